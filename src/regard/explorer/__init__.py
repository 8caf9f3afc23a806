"""The explorer: a model's attention in a browser, live, as a file or in a notebook."""
