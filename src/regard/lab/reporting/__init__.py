"""The lab's report."""
