"""One call: checked once, its path chosen, computed."""
