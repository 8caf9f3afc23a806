"""The one error of checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be had or trusted: missing, cut short, inconsistent, hostile, or of an unknown form.

    >>> import regard as rg
    >>> try:
    ...     rg.load("no/such/folder")
    ... except rg.CheckpointError as error:
    ...     print(str(error)[:38])
    no/such/folder: expected a folder with
    """
