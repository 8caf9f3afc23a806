"""One call of attention: its arguments are checked, a path is chosen, the path computes it."""
