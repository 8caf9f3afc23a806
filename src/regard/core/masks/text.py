"""A sliding window from text, as the flags of commands have it: BEFORE or BEFORE,AFTER."""

from regard.core.masks.positions import Window

WINDOW = "BEFORE[,AFTER]"
"""What help calls the value of a flag."""
WINDOW_HELP = "Sliding window: a token sees itself, BEFORE tokens before it and AFTER (0) after it."


def window_from_text(name: str, text: str) -> Window:
    """The window that was typed for the option `name`.

    >>> from regard.core.masks.text import window_from_text
    >>> window_from_text("window", "15"), window_from_text("window", "8,8")
    (Window(before=15), Window(before=8, after=8))
    """
    numbers = text.split(",")
    if len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{name}: expected BEFORE or BEFORE,AFTER of at least 0, like 15 or 8,8, got {text!r:.40}")
    return Window(*map(int, numbers))
