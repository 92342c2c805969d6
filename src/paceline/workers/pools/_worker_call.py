"""A call of a driver's function, as it travels to the workers."""

import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple


class WorkerCall(NamedTuple):
    """Call of a function in the workers."""

    main: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def value(self) -> Any:
        """Make the call."""
        try:
            return self.main(*self.args, **self.kwargs)
        except SystemExit as request:
            if getattr(request, "is_success", False):
                # The core API ends a process so whose hyperparameters are invalid.
                return None
            raise


def fill_main(program: ModuleType, function: Any) -> None:
    """Let plain pickle find in `__main__` what has travelled by value, as `torch.save` does."""
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    if getattr(function, "__module__", None) == "__main__":
        for name, value in getattr(function, "__globals__", {}).items():
            if not name.startswith("__"):
                setattr(program, name, value)


def traceback_text(error: BaseException, caller: str) -> str:
    """Return the text of an exception from where the file `caller` called the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (caller, __file__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
