"""Import of a library that an integration needs."""

from importlib import import_module
from types import ModuleType


def required_library(module: str, user: str, install: str) -> ModuleType:
    """Return a module of another library.

    Args:
        module: The module.
        user: Who needs it, for the message.
        install: What pip is to install.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ImportError(
            f"`{user}` needs the package `{library}`, which is not installed. Hint: pip install"
            f" '{install}'"
        ) from error
