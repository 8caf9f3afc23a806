"""States: KV caches and recurrent states."""
