"""The call of a driver's function in its workers, as files in a private directory.

driver.json    where the driver finds modules, its arguments and its log level
call.pickle    the function and its arguments, the same for all ranks
rank-N.value   what the function returned on a rank
rank-N.error   what it raised there
"""

import json
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from paceline.workers._pickling import dump, dump_error, load, load_error
from paceline.workers._program import CALL_FACTS

_FUNCTION = "call.pickle"


class Call(NamedTuple):
    """What the workers are to do."""

    main: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallError(NamedTuple):
    """What a rank's function raised: the exception, if it could travel, and the traceback."""

    error: BaseException | None
    traceback: str


# ---- the driver's side -----------------------------------------------------------------------


def write_call(directory: Path, call: Call) -> None:
    """Write what the workers need for the call.

    Raises:
        NotSendableError: The function or an argument cannot be pickled.
    """
    root = logging.getLogger()
    facts = {
        "path": [path or os.getcwd() for path in sys.path],
        "arguments": sys.argv,
        "file": getattr(sys.modules["__main__"], "__file__", None),
        "log_level": root.level if root.handlers else None,
    }
    (directory / CALL_FACTS).write_text(json.dumps(facts))
    with (directory / _FUNCTION).open("wb") as file:
        dump(call, file, what="The call", name="")


def read_value(directory: Path, rank: int) -> Any:
    """Return what a rank's function returned."""
    with _value_path(directory, rank).open("rb") as file:
        return load(file)


def read_error(directory: Path, rank: int) -> CallError | None:
    """Return what a rank's function raised, or None if it said nothing."""
    try:
        data, text = pickle.loads(_error_path(directory, rank).read_bytes())  # noqa: S301 - ours
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        # A worker that was killed may not have got that far.
        return None
    return CallError(load_error(data), text)


# ---- the worker's side -----------------------------------------------------------------------


def perform(directory: str, program: ModuleType, facts: Mapping[str, Any]) -> None:
    """Make the call in this worker, and write what comes of it.

    Args:
        directory: The call's directory.
        program: The worker's `__main__`.
        facts: The content of ``driver.json``.
    """
    folder, rank = Path(directory), int(os.environ["RANK"])
    if facts["log_level"] is not None:
        from paceline import LOG_FORMAT

        logging.basicConfig(format=LOG_FORMAT, level=facts["log_level"])
    try:
        with (folder / _FUNCTION).open("rb") as file:
            call: Call = load(file)
        fill_main(program, call.main)
        value = _value_of(call)
        with _value_path(folder, rank).open("wb") as file:
            dump(value, file, what=f"What rank {rank} returned", name="value")
    except BaseException as error:
        _tell(error, _error_path(folder, rank))
        raise


def _value_of(call: Call) -> Any:
    try:
        return call.main(*call.args, **call.kwargs)
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
    while frames is not None and frames.tb_frame.f_code.co_filename == caller:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _tell(error: BaseException, path: Path) -> None:
    text = traceback_text(error, __file__)
    temporary = path.with_suffix(".part")
    try:
        temporary.write_bytes(pickle.dumps((dump_error(error), text)))
        temporary.rename(path)
        # The driver shows it.
        error.is_told_to_driver = True  # type: ignore[attr-defined] # for `_program`
    except OSError:
        # It is shown here instead.
        return


def _value_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.value"


def _error_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.error"
