"""A function that workers call, named to them without importing its module here."""

from importlib import import_module
from typing import Any


class InWorker:
    """A function that a worker calls, by its name.

    The driver does not import its module, as that may load torch.

    Args:
        module: The module.
        name: The function.
        func: A function of the user's that it is to call, whose script's names the worker needs.
    """

    def __init__(self, module: str, name: str, func: Any = None) -> None:
        self._module = module
        self._name = name
        # The pool looks for it under the name that `functools.partial` has for it.
        self.func = func

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return getattr(import_module(self._module), self._name)(*args)
