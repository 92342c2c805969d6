"""Command of a worker, from the arguments after the options."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.launch._launcher_arguments import LaunchArgumentError
from paceline.workers import PROGRAM_FILE, WorkerCommand

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?\Z")
_FLAGS_ALONE = frozenset("bBdEIOPqsuvx")
_FLAGS_WITH_VALUE = frozenset("WX")
_PROGRAM_FLAGS = {"m": "module", "c": "code"}


def worker_command(program: Sequence[str]) -> WorkerCommand:
    """Return the command that runs a program as a worker.

    Raises:
        LaunchArgumentError: A script does not exist, or `-m` has no module.
    """
    first, *rest = program
    if first == "-m" or first.endswith(".py"):
        return _wrapped_command(sys.executable, [], list(program)) or _as_it_is(program)
    if _INTERPRETER.match(os.path.basename(first)):
        flags, target = _split_flags(rest)
        wrapped = _wrapped_command(_interpreter(first), flags, target)
        if wrapped is not None:
            return wrapped
    return _as_it_is(program)


def _as_it_is(program: Sequence[str]) -> WorkerCommand:
    return WorkerCommand(arguments=tuple(program), is_python=False)


def _interpreter(name: str) -> str:
    """Return the interpreter for a name; a bare name that fits this one means this one.

    It is the one that has Paceline, while the PATH may lead to another.
    """
    version = name.removeprefix("python")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    is_bare = os.sep not in name
    return sys.executable if is_bare and version in ("", own, own.split(".")[0]) else name


def _split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words after an interpreter into its flags and what it is to run."""
    flags: list[str] = []
    rest = list(words)
    while rest and len(rest[0]) > 1 and rest[0].startswith("-"):
        word = rest[0]
        if word.startswith("--"):
            return flags, rest
        for position, letter in enumerate(word[1:], start=1):
            if letter in _PROGRAM_FLAGS:
                alone, value = word[1:position], word[position + 1 :]
                flags += [f"-{alone}"] if alone else []
                return flags, [f"-{letter}", *([value] if value else []), *rest[1:]]
            if letter in _FLAGS_WITH_VALUE:
                num_words = 1 if word[position + 1 :] else 2
                flags += rest[:num_words]
                rest = rest[num_words:]
                break
            if letter not in _FLAGS_ALONE:
                return flags, rest
        else:
            flags.append(rest.pop(0))
    return flags, rest


def _wrapped_command(interpreter: str, flags: list[str], target: list[str]) -> WorkerCommand | None:
    """Return the command that runs a Python program in the wrapper, None if it cannot."""
    if not target:
        return None
    first, *arguments = target
    if first in ("-m", "-c"):
        if not arguments:
            raise LaunchArgumentError(
                f"`{first}` must be followed by {'a module' if first == '-m' else 'code'},"
                " but got nothing."
            )
        kind = _PROGRAM_FLAGS[first[1:]]
    elif first.startswith("-") or Path(first).is_dir():
        return None
    else:
        kind, arguments = "script", target
        if not Path(first).is_file():
            raise LaunchArgumentError(
                f"The script must exist, but there is no file {first!r} in {os.getcwd()!r}."
            )
    command = (interpreter, *flags, PROGRAM_FILE, kind, *arguments)
    return WorkerCommand(arguments=command, is_python=True)
