"""Experiments on documents 000, 001 and 002: verdicts, and what turns them."""

from lab_case import LabCase
from regard.lab.experiments import scaling as scaling_file


def _no_scale(patch):
    patch.setattr(scaling_file, "SCALED", scaling_file.UNSCALED)


CASES = {
    "scaling": LabCase(verdict="holds", flip=_no_scale, quick={"dims": (4, 64), "samples": 5_000}, statistical=True),
}
