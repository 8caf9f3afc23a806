"""Models: the forms people know, on any mechanism."""
