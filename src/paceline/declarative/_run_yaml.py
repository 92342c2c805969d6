"""A run as a YAML file."""

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import paceline
from paceline import LOG_FORMAT
from paceline.config._fields_and_problems import ConfigError
from paceline.config._read_yaml import apply_overrides, parse_yaml
from paceline.core._launcher_place import launched_place
from paceline.core._run_directories import run_name
from paceline.declarative._config_classes import PretrainingConfig, TrainingConfig
from paceline.declarative._objects_as_json import ObjectFinder
from paceline.declarative._trainer_and_tester import Trainer

_PACKAGE = "paceline.declarative"
_HINT = "--allow {module} if you trust it."
_KINDS: dict[str, type[TrainingConfig]] = {
    kind.__name__: kind for kind in (TrainingConfig, PretrainingConfig)
}


class RunFileError(ValueError):
    """Raised when a file describes no run."""


def load_run(
    path: str | os.PathLike[str],
    *,
    allowed_modules: Iterable[str] = (),
    overrides: Sequence[str] = (),
) -> TrainingConfig:
    """Return the config described by a YAML file, with overrides.

    A class is given by its import path, and an object, such as a loss or a data set, as
    ``{object: PATH, arguments: {...}}``. They may come from torch, from modules that lie beside the
    file, and from those that are allowed. ``config_class: PretrainingConfig`` chooses that class.

    Args:
        path: The file.
        allowed_modules: Packages and modules that may be imported as well.
        overrides: Fields to set, each as `field=value` or `model_params.width=value`.

    Raises:
        RunFileError: A field is unknown or wrong, or something cannot be found.
        FileNotFoundError: There is no such file.
    """
    file = Path(path)
    text = _text_of(file)
    directory = str(file.absolute().parent)
    if directory not in sys.path:
        # Modules beside the file are importable, like those beside a script.
        sys.path.insert(0, directory)
    beside = [entry.stem for entry in file.absolute().parent.iterdir() if _is_module(entry)]
    try:
        data = apply_overrides(_parsed(text, file), overrides)
        # A file that a run has written names the module too.
        name = str(data.pop("config_class", "TrainingConfig")).rpartition(".")[2]
        if name not in _KINDS:
            raise RunFileError(
                f"`config_class` must be {' or '.join(_KINDS)}, but got {name!r}: {file}."
            )
        config = _KINDS[name]()
        config.load_found(data, ObjectFinder({}, (*beside, *allowed_modules), _PACKAGE, _HINT))
    except (ConfigError, ValueError, TypeError) as error:
        if not is_explained(error):
            # User code raised the error: its traceback is needed.
            raise
        raise RunFileError(f"{file} must describe a run, but: {error}") from error
    return config


def _text_of(file: Path) -> str:
    if not file.exists():
        raise FileNotFoundError(f"The file that describes a run must exist, but {file} does not.")
    if not file.is_file():
        raise RunFileError(f"{file} must be a file that describes a run, but is none.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunFileError(f"{file} must be text in UTF-8, but is not: {error}.") from error


def _parsed(text: str, file: Path) -> dict[str, Any]:
    if file.suffix != ".json":
        return parse_yaml(text, file_name=str(file))
    # YAML takes 1e-05 for text.
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RunFileError(f"{file} must be JSON, but is not: {error}.") from error
    if not isinstance(data, dict):
        raise RunFileError(f"{file} must hold a map of fields, but holds {data!r}.")
    return data


def is_explained(error: BaseException) -> bool:
    """Return whether an error was raised by this package and needs no traceback.

    Errors of the user's own code, or of this package, need their traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    is_ours = Path(last.filename).is_relative_to(Path(paceline.__file__).parent)
    return is_ours and (last.line or "").startswith("raise ")


def _is_module(entry: Path) -> bool:
    is_package = entry.is_dir() and (entry / "__init__.py").exists()
    return (entry.suffix == ".py" or is_package) and entry.stem.isidentifier()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the run described by a YAML file, and return the exit code.

    Raises:
        RunFileError: The file describes no run.
    """
    parser = argparse.ArgumentParser(
        prog="python3 -m paceline.declarative",
        description="Run the training that a YAML file describes.",
    )
    parser.add_argument("file", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="FIELD=VALUE", help="values for fields of the file"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="also allow classes from MODULE",
    )
    given = parser.parse_intermixed_args(arguments)
    for override in given.overrides:
        if "=" not in override:
            parser.error(f"{override!r} must be a field and its value, such as num_epochs=5")
    place = launched_place()
    # Info messages come from rank 0 only; warnings and errors come from every rank.
    is_chief = place is None or place.rank == 0
    logging.basicConfig(level=logging.INFO if is_chief else logging.WARNING, format=LOG_FORMAT)
    config = load_run(given.file, allowed_modules=given.allow, overrides=given.overrides)
    trainer = Trainer(config)
    trainer.run_name = run_name(given.file)
    trainer.build()
    trainer.run_training()
    return 0
