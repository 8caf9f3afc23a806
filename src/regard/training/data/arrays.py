"""Arrays by name in one .npz file of a run."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.checkpoints.errors import CheckpointError


def load_arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """Some arrays of a file; CheckpointError, which names it, for a file that is truncated or damaged.

    >>> import tempfile
    >>> from regard.training.data.arrays import load_arrays
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/some.npz", first=np.arange(3), second=np.ones(2))
    ...     load_arrays(Path(folder) / "some.npz", "first")
    [array([0, 1, 2])]
    """
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            return [file[name] for name in names]
    except (EOFError, LookupError, TypeError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{path}: expected the arrays {', '.join(names)}, got {reason:.200}") from None
