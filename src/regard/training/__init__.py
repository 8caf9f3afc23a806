"""Training: recipes, any mechanism, one machine or many, nothing lost.

A recipe gives a `Task` (a model, its examples, its loss); `train` runs it in a folder that holds everything about the
run and that `rg.load` opens.
"""

from regard.core.extras import needed_for

with needed_for("training", "train"):
    from regard.training.loop import Report, train
    from regard.training.settings import Settings, option
    from regard.training.task import IGNORED, Batch, Card, Task, Totals

__all__ = ["IGNORED", "Batch", "Card", "Report", "Settings", "Task", "Totals", "option", "train"]
