"""The experiments: one file each, named as its function, which registers itself."""
