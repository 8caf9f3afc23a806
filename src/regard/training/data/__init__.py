"""What recipes train on: data that every machine has, and readers of a user's own."""
