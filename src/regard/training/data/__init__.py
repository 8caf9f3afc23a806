"""Data for the recipes: embedded data sets that need no download, and readers of a user's files."""
