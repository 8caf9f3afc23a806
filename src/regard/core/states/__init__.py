"""States: what a stream keeps."""
