"""Settings that are numbers in environment variables."""

import os


def integer_setting(name: str, default: int) -> int:
    """Return an environment variable as an integer of at least 1, or its default.

    Raises:
        ValueError: It is none.
    """
    text = os.environ.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"`{name}` must be an integer above 0, but got {text!r}.")
    return int(text)
