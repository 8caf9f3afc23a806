"""Paths: the implementations of a mechanism. Each says which calls it cannot compute; `regard.explain` shows the
choice."""
