"""The lab's report: every experiment run, as one HTML page, a PDF and a JSON file.

>>> from regard.lab.reporting import report
>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     report(["scaling"], folder=folder, pdf=False).counts
{'holds': 1}
"""

from regard.lab.reporting.folder import report as report

__all__ = ["report"]
