"""Code in the pages that people read: what stands between ```python and ```."""

import re
from pathlib import Path


def python_blocks(page: Path) -> list[str]:
    """The Python of a page, block by block, each padded with empty lines so that errors name the page's line."""
    text = page.read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, block.start(1)) + block[1]
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
