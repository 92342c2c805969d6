"""A run as a YAML file."""

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline import LOG_FORMAT
from paceline.config import ConfigError, apply_overrides, parse_yaml
from paceline.core import launched_place, run_name
from paceline.declarative._config_classes import PretrainingConfig, TrainingConfig
from paceline.declarative._declarative_trainer import Trainer

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
    """Return the config that a YAML file describes, by fields.

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
    text = file.read_text()
    directory = str(file.absolute().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    beside = [entry.stem for entry in file.absolute().parent.iterdir() if _is_module(entry)]
    try:
        data = apply_overrides(parse_yaml(text, file_name=str(file)), overrides)
        name = data.pop("config_class", "TrainingConfig")
        if name not in _KINDS:
            raise RunFileError(
                f"`config_class` must be {' or '.join(_KINDS)}, but got {name!r}: {file}."
            )
        config = _KINDS[name]()
        config.load_dict(data, allowed_modules=(*beside, *allowed_modules))
    except (ConfigError, ValueError, TypeError) as error:
        raise RunFileError(f"{file} must describe a run, but: {error}") from error
    return config


def _is_module(entry: Path) -> bool:
    is_package = entry.is_dir() and (entry / "__init__.py").exists()
    return (entry.suffix == ".py" or is_package) and entry.stem.isidentifier()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what a YAML file describes, and return the exit code.

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
    given = parser.parse_args(arguments)
    for override in given.overrides:
        if "=" not in override:
            parser.error(f"{override!r} must be a field and its value, such as num_epochs=5")
    place = launched_place()
    # One rank speaks for all, unless something is wrong.
    is_chief = place is None or place.rank == 0
    logging.basicConfig(level=logging.INFO if is_chief else logging.WARNING, format=LOG_FORMAT)
    config = load_run(given.file, allowed_modules=given.allow, overrides=given.overrides)
    trainer = Trainer(config)
    trainer.run_name = run_name(given.file)
    trainer.build()
    trainer.run_training()
    return 0
