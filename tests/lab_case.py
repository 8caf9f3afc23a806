"""An experiment as the tests of the lab know it: its verdict, quick parameters, and what turns the verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from regard.lab.experiment import Verdict


@dataclass(frozen=True, kw_only=True)
class LabCase:
    """An experiment as the suite runs it.

    `flip` breaks the library or a formula of the experiment, by `patch.setattr`; the verdict must then be another.
    """

    verdict: Verdict
    flip: Callable[[pytest.MonkeyPatch], None]
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Parameters with which the experiment takes well under a second, and has the same verdict."""
    statistical: bool = False
    """The verdict rests on random estimates: it must be the same for ten seeds."""
