"""Train a trial class as its experiment's config says.

Run as ``python3 -m paceline.pytorch.run_trial module:Class``, in the directory that has the module.
An experiment with the entrypoint ``module:Class`` runs this.
"""

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from paceline import LOG_FORMAT, pytorch
from paceline.core._cluster_info import get_cluster_info

_USAGE = "usage: python3 -m paceline.pytorch.run_trial module:Class"


class RunTrialError(ValueError):
    """Raised when the trial class or the experiment for its training is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the trial class and return the exit code.

    Raises:
        RunTrialError: There is no such class, or the process runs for no experiment.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1 or given[0].startswith("-") or ":" not in given[0]:
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    info = get_cluster_info()
    if info is None:
        raise RunTrialError(
            f"{given[0]!r} must be run for an experiment, whose config says how to train, but this"
            " process runs for none. Hint: paceline experiment create CONFIG DIR --local"
        )
    trial_class = load_trial_class(given[0])
    _log(is_debug=bool(info.trial.config.get("debug")))
    with pytorch.init() as context:
        pytorch.Trainer(trial_class(context), context).fit()
    return 0


def load_trial_class(name: str) -> type[pytorch.PyTorchTrial]:
    """Import a trial class from the working directory or whatever is installed.

    Args:
        name: The module and the class, as `module:Class`.

    Raises:
        RunTrialError: There is no such module or class, or it is no `PyTorchTrial`.
    """
    module_name, _, class_name = name.partition(":")
    module = _import_trial_module(module_name)
    found = getattr(module, class_name, None)
    if inspect.isclass(found) and issubclass(found, pytorch.PyTorchTrial):
        return found
    others = ", ".join(_trial_names(module)) or "none"
    if not hasattr(module, class_name):
        raise RunTrialError(
            f"The module `{module_name}` must have the class `{class_name}`, but has no such name."
            f" Its trial classes: {others}."
        )
    raise RunTrialError(
        f"`{name}` must be a subclass of paceline.pytorch.PyTorchTrial, but is {_kind_of(found)}."
        f" The module's trial classes: {others}."
    )


def _import_trial_module(name: str) -> ModuleType:
    directory = os.getcwd()
    # The interpreter's option -P leaves it out.
    if directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Modules missing inside the user's module raise with their own traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise RunTrialError(
            f"The module `{name}` must be in the working directory {directory!r} or installed, but"
            f" there is no `{error.name}`. Hint: DIR in `paceline experiment create CONFIG DIR` is"
            " the directory with the code."
        ) from error


def _trial_names(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, pytorch.PyTorchTrial) and value.__module__ == module.__name__
    ]


def _kind_of(value: object) -> str:
    return "another class" if inspect.isclass(value) else f"a {type(value).__name__}"


def _log(*, is_debug: bool) -> None:
    level = logging.DEBUG if is_debug else logging.INFO
    # Messages below warnings come from rank 0 only; warnings and errors from every rank.
    is_chief = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=level if is_chief else logging.WARNING, format=LOG_FORMAT)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunTrialError as error:
        sys.exit(f"paceline.pytorch.run_trial: error: {error}")
