"""The core: masks, mechanisms, states, paths, cost, laws."""
