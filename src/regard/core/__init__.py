"""The core: masks, mechanisms, states (KV caches and recurrent states), paths, cost, laws."""
