"""Imported once by the process that the lab's experiments are forked from, with all that they import themselves."""

from regard.core.style import new_figure
from regard.explorer import lab as lab
from regard.lab.drawing import svg
from regard.lab.registry import experiments

experiments()
svg(new_figure(2, 1, title="fonts"))  # their list is read once
