"""The README as package indexes show it; all else about the package is in pyproject.toml.

An index shows the text without the files beside it. Pictures and links to files are addressed in the repository that
`[project.urls]` names as `Source`; without one, pictures are left out and links become plain words.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURE = re.compile(r"^!\[[^]]*]\((?!https?:)([^)\s]+)\)\n*", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^]]+)]\((?!https?:|#)([^)\s]+)\)")


def description(readme: str, source: str | None) -> str:
    """`readme` without addresses that only a checkout has."""
    if source is None:
        return LINK.sub(r"\1", PICTURE.sub("", readme))
    absolute = PICTURE.sub(
        lambda picture: picture[0].replace(f"]({picture[1]})", f"]({source}/raw/main/{picture[1]})"), readme
    )
    return LINK.sub(rf"[\1]({source}/blob/main/\2)", absolute)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(readme, project.get("urls", {}).get("Source")),
        long_description_content_type="text/markdown",
    )
