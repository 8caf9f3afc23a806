"""Experiments on document 003 and on trained models: verdicts, and what turns them."""

from lab_case import LabCase

CASES: dict[str, LabCase] = {}
