"""The lab: statements about attention as experiments. `regard lab` on the command line, `rg.lab` in a notebook.

>>> import regard as rg
>>> rg.lab.run("scaling", dims=(4, 64), samples=20_000)
scaling: holds
  ...
"""

from regard.lab.experiment import Check as Check
from regard.lab.experiment import Experiment as Experiment
from regard.lab.experiment import Measurements as Measurements
from regard.lab.experiment import Outcome as Outcome
from regard.lab.question import Mark as Mark
from regard.lab.question import check as check
from regard.lab.registry import experiments as experiments
from regard.lab.registry import run as run

__all__ = ["Check", "Experiment", "Mark", "Measurements", "Outcome", "check", "experiments", "run"]
