"""Entrypoint: its forms, the filled-in hyperparameters, and the resulting command."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

from paceline.config._fields_and_problems import ConfigError, Problem, refused, refused_parts

_ALLOWED = "a command as one string, a list of strings, or `module:Class`"
_TRIAL_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_TRIAL_PROGRAM = "paceline.pytorch.run_trial"
_CONFIG_PROGRAM = "paceline.declarative"
_LAUNCHER = "paceline.launch.torch_distributed"
# `$${name}` is an escape, `${hparams.name}` a hyperparameter; any other variable is the shell's.
_REFERENCE = re.compile(r"\$\$\{(?P<escaped>[^{}]*)\}|\$\{hparams\.(?P<name>[^{}]*)\}")
# A program such as setsid continues in the background if it leads a process group, as the first
# process does; below a shell it does not. The shell must not become that program, either.
_BELOW_A_SHELL = '"$@"; exit "$?"'
_FOREIGN_LAUNCHER = re.compile(r"\bdetermined\.launch\.(\w+)")
_OWN_LAUNCHERS = ("deepspeed", "horovod", "torch_distributed")
_NOT_THERE = object()

_Entrypoint = TypeVar("_Entrypoint", str, list[str], str | list[str])


def check_entrypoint(value: Any) -> Any:
    """Refuse anything but a command; for use as a validator."""
    if isinstance(value, str):
        _check_launcher(value)
        return _check_command(value)
    if not isinstance(value, list):
        raise refused("must be a command", _ALLOWED)
    problems = [
        Problem(path=f"[{index}]", value=item, message="must be a string", allowed="a string")
        for index, item in enumerate(value)
        if not isinstance(item, str) or "\0" in item
    ]
    if problems:
        raise refused_parts(problems)
    if not value or not value[0].strip():
        raise refused("must name a program first", "a list such as [python3, train.py]")
    _check_launcher(" ".join(value))
    return list(value)


def _check_launcher(command: str) -> None:
    if (found := _FOREIGN_LAUNCHER.search(command)) is None:
        return
    name = found[1] if found[1] in _OWN_LAUNCHERS else "torch_distributed"
    raise refused(
        f"must not start by `{found[0]}`, which works in a cluster of Determined only",
        hint=f"write `paceline.launch.{name}`.",
    )


def _check_command(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise refused("must not be blank", _ALLOWED)
    return value


def trial_class(entrypoint: Any) -> str | None:
    """Return the entrypoint if in the form of a trial class, `module:Class`; else None."""
    if not isinstance(entrypoint, str) or not _TRIAL_CLASS.fullmatch(entrypoint.strip()):
        return None
    return entrypoint.strip()


def build_command(
    entrypoint: str | list[str],
    *,
    hparams: dict[str, Any],
    python: str,
    num_slots: int,
    prefix: Sequence[str] = (),
) -> str | list[str]:
    """Return an attempt's command: a command line for the shell, or a program and its arguments.

    A trial class is run by a program of Paceline's own, on several slots by the launcher.

    Args:
        entrypoint: The config's entrypoint.
        hparams: The hyperparameters of the trial.
        python: The interpreter that runs a trial class.
        num_slots: The slots that the attempt holds.
        prefix: A program and its arguments, which runs the command.

    Raises:
        ConfigError: The entrypoint refers to a hyperparameter that there is not.
    """
    name = trial_class(entrypoint)
    if name is None:
        command: str | list[str] = fill_entrypoint(entrypoint, hparams=hparams)
    else:
        launcher = ["-m", _LAUNCHER] if num_slots > 1 else []
        command = [python, *launcher, "-m", _TRIAL_PROGRAM, name]
    if not prefix:
        return command
    words = ["sh", "-c", command] if isinstance(command, str) else command
    return ["sh", "-c", _BELOW_A_SHELL, "sh", *prefix, *words]


def default_name_by_entrypoint(entrypoint: Any) -> str:
    """Return a name for an experiment: its class's, script's, YAML file's or module's.

    An entrypoint without any of them is called `experiment`.
    """
    if (name := trial_class(entrypoint)) is not None:
        return name.rpartition(":")[2]
    words = entrypoint
    if isinstance(entrypoint, str):
        try:
            words = shlex.split(entrypoint)
        except ValueError:
            words = []
    if not isinstance(words, list):
        return "experiment"
    texts = [word for word in words if isinstance(word, str)]
    for word in texts:
        if word.endswith(".py") and PurePosixPath(word).stem.strip():
            return PurePosixPath(word).stem
    # The last `-m` is the user's: one before it starts the processes.
    for option, module in reversed(list(zip(texts, texts[1:], strict=False))):
        if option == "-m" and module.strip():
            described = [word for word in texts if word.endswith((".yaml", ".yml"))]
            if module == _CONFIG_PROGRAM and described:
                return PurePosixPath(described[0]).stem
            return module.rpartition(".")[2] or "experiment"
    return "experiment"


def fill_entrypoint(entrypoint: _Entrypoint, *, hparams: dict[str, Any]) -> _Entrypoint:
    """Return the entrypoint with each `${hparams.name}` replaced by the trial's value.

    Dots lead into nested maps. A string is filled in as it is, any other value as JSON. In a
    command string the value is quoted for the shell, so the reference itself must stand outside
    quotes; in a list it becomes part of its item. `$${...}` stands for a literal `${...}`, and
    other variables are left to the shell.

    Raises:
        ConfigError: a name is not among the hyperparameters.
    """
    problems = [
        _unknown_name_in_entrypoint(f"entrypoint{path}", text, name, _names_for_entrypoint(hparams))
        for path, text, name in _references_in_entrypoint(entrypoint)
        if _look_up_for_entrypoint(hparams, name) is _NOT_THERE
    ]
    if problems:
        raise ConfigError(problems)
    if isinstance(entrypoint, str):
        return _REFERENCE.sub(
            lambda m: _replacement_in_entrypoint(m, hparams, quote=True), entrypoint
        )
    return [
        _REFERENCE.sub(lambda m: _replacement_in_entrypoint(m, hparams, quote=False), e)
        for e in entrypoint
    ]


def _replacement_in_entrypoint(
    match: re.Match[str], hparams: dict[str, Any], *, quote: bool
) -> str:
    if match["escaped"] is not None:
        return "${" + match["escaped"] + "}"
    value = _look_up_for_entrypoint(hparams, match["name"])
    text = value if isinstance(value, str) else json.dumps(value)
    return shlex.quote(text) if quote else text


def reference_problems(entrypoint: Any, space: dict[str, Any]) -> list[Problem]:
    """Return a problem for each `${hparams.name}` missing in some sample of the space."""
    return [
        _unknown_name_in_entrypoint(path, text, name, [*_space_names(space, "")])
        for path, text, name in _references_in_entrypoint(entrypoint)
        if not _is_in_space(space, name.split("."))
    ]


def _references_in_entrypoint(entrypoint: str | list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the path of each piece of text, the text and the referenced name."""
    pieces = (
        [("", entrypoint)]
        if isinstance(entrypoint, str)
        else [(f"[{index}]", item) for index, item in enumerate(entrypoint)]
    )
    for path, text in pieces:
        for match in _REFERENCE.finditer(text):
            if match["name"] is not None:
                yield path, text, match["name"]


def _unknown_name_in_entrypoint(path: str, text: str, name: str, known: list[str]) -> Problem:
    return Problem(
        path=path,
        value=text,
        message=f"refers to `hparams.{name}`, which is not a hyperparameter",
        allowed=", ".join(sorted(known)) if known else "no reference, as there are none",
        hint="write `$${...}` for a literal `${...}`.",
    )


def _names_for_entrypoint(hparams: dict[str, Any]) -> list[str]:
    """Return the dotted names of all values in nested maps, sorted."""
    names: list[str] = []
    for name, value in hparams.items():
        if isinstance(value, dict) and value:
            names.extend(f"{name}.{inner}" for inner in _names_for_entrypoint(value))
        else:
            names.append(name)
    return sorted(names)


def _look_up_for_entrypoint(hparams: Any, dotted: str) -> Any:
    value: Any = hparams
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            return _NOT_THERE
        value = value[part]
    return value


def _space_names(space: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, node in space.items():
        if isinstance(node, dict) and node and "type" not in node:
            yield from _space_names(node, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _is_in_space(node: Any, parts: list[str]) -> bool:
    """Say whether every sample of a part of the space has the name."""
    if not parts:
        return True
    if not isinstance(node, dict):
        return False
    if "type" not in node:
        return parts[0] in node and _is_in_space(node[parts[0]], parts[1:])
    values = [node.get("val")] if node["type"] == "const" else node.get("vals", [])
    dotted = ".".join(parts)
    return bool(values) and all(
        _look_up_for_entrypoint(value, dotted) is not _NOT_THERE for value in values
    )
