"""The questions of worksheets: a file for each group of topics, whose functions register themselves."""
