"""Tracing: what attention did in a model, recorded from outside. The public names are those of `inference.trace`."""
