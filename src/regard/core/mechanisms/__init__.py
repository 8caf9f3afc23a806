"""The shipped mechanisms, by name. Lists anywhere (commands, laws, benchmarks, README) are derived from `REGISTRY`."""

from difflib import get_close_matches

from regard.core.families.mechanism import Mechanism
from regard.core.mechanisms.channel import Channel
from regard.core.mechanisms.delta import Delta
from regard.core.mechanisms.gated import Gated
from regard.core.mechanisms.kernel import Elu, Kernel, RandomFeatures
from regard.core.mechanisms.polynomial import Polynomial, Quadratic, Taylor
from regard.core.mechanisms.retention import Retention
from regard.core.mechanisms.softmax import Argmax, Softmax, Uniform

REGISTRY: dict[str, Mechanism] = {
    "softmax": Softmax(),
    "softcap": Softmax(softcap=30.0),
    "argmax": Argmax(),
    "uniform": Uniform(),
    "quadratic": Quadratic(),
    "polynomial": Polynomial(degree=4),
    "elu": Elu(),
    "taylor": Taylor(),
    "random-features": RandomFeatures(n=64),
    "retention": Retention(),
    "gated": Gated(),
    "delta": Delta(),
    "channel": Channel(),
    "channel-by-channels": Channel(scale="channels"),
}


def hint(name: object) -> str:
    """The mechanism whose name may have been meant, for errors.

    >>> from regard.core.mechanisms import hint
    >>> hint("sofmax"), hint("nothing like it")
    ('; did you mean softmax?', '')
    """
    close = get_close_matches(str(name), REGISTRY, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def named(name: str) -> Mechanism:
    """The mechanism of a name, or an error that lists the names.

    >>> from regard.core.mechanisms import named
    >>> named("quadratic")
    Quadratic(c=1.0)
    """
    if name not in REGISTRY:
        raise ValueError(f"mechanism: expected one of {', '.join(REGISTRY)}, got {name!r}{hint(name)}")
    return REGISTRY[name]


__all__ = [
    "REGISTRY",
    "Argmax",
    "Channel",
    "Delta",
    "Elu",
    "Gated",
    "Kernel",
    "Polynomial",
    "Quadratic",
    "RandomFeatures",
    "Retention",
    "Softmax",
    "Taylor",
    "Uniform",
    "named",
]
