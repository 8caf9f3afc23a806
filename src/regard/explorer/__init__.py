"""The explorer: what a model's attention does, and what changes if it is changed, in a browser.

`server.py` answers a page on this machine, `export.py` writes the page as one file, `notebook.py` shows that file.
"""
