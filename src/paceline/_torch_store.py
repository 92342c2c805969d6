"""torch's TCPStore, in builds of torch with libuv and without."""

import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_VARIABLE = "USE_LIBUV"


def with_available_store(make: Callable[[bool], T]) -> T:
    """Make what needs a TCPStore, once more without libuv if torch was built without it.

    torch asks for libuv unless USE_LIBUV is 0, and fails in such a build, as Debian's. The variable
    is set then, so that all later stores of this process do without libuv. Stores of both kinds
    understand each other.

    Args:
        make: Makes it; gets whether to use libuv. What reads the variable need not look at that.
    """
    try:
        return make(os.environ.get(_VARIABLE, "1") == "1")
    except RuntimeError as error:
        if "without libuv" not in str(error) or os.environ.get(_VARIABLE) == "0":
            raise
    os.environ[_VARIABLE] = "0"
    return make(False)
