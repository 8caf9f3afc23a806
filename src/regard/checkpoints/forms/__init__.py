"""The published architectures, one file each."""
