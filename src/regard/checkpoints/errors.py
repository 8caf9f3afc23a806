"""The error that all faults of checkpoints raise."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: missing, truncated, inconsistent, malicious, or of an unknown architecture.

    >>> import regard as rg
    >>> try:
    ...     rg.load("no/such/folder")
    ... except rg.CheckpointError as error:
    ...     print(str(error)[:38])
    no/such/folder: expected a folder with
    """
