"""Experiments on document 004: verdicts, and what turns them."""

from lab_case import LabCase

CASES: dict[str, LabCase] = {}
