"""Options of the launchers, spelled as torchrun's, the workers' command.

Also: and the variables of a back end.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline._training.workers.process_pools import WorkerCommand, WorkerVariables
from paceline._training.workers.processes.leftover_processes import LEAST_HEARTBEAT_TIMEOUT_S
from paceline._training.workers.processes.worker_program import PROGRAM_FILE

USAGE = """\
usage: python3 -m paceline.launch.{launcher} [OPTIONS --] PROGRAM [ARGUMENTS]

Start one worker per slot of this node. PROGRAM is one of
  train.py                        a script; this interpreter runs it
  -m package.module               a module; this interpreter runs it
  python3 [FLAGS] train.py        a script (or -m, -c) with an interpreter and its flags;
                                  `python3` alone means this interpreter
  any other command               started unchanged, once per worker

options (with - or _, as `--name VALUE` or `--name=VALUE`):
  --nproc-per-node N|auto|gpu|cpu number of workers on this node (default: the slots of the
                                  attempt, else 1); auto: one per GPU, else one per core
  --nproc-per-node LEAST:MOST     one worker per GPU, else one per core, within these bounds;
                                  each start counts the devices again
  --tensor-parallel-size N        the number of workers is a multiple of N, as N divide a model
                                  (`tensor_parallel_size` of the training); the rest of what
                                  could run waits for more (default 1)
  --nnodes N                      number of nodes (default 1)
  --node-rank N                   rank of this node (default 0)
  --master-addr ADDRESS           address of node 0 (default 127.0.0.1)
  --master-port PORT              port of rank 0 (default: a free port). On several nodes: the port
                                  where the launchers meet, on node 0 (default 29400); each start
                                  of the workers then uses a free port
  --max-restarts N                number of restarts after a worker is lost or fails (default 0);
                                  the run continues from its last checkpoint. On several nodes it
                                  counts for all of them
  --nodes-timeout-s SECONDS       time to wait for the launchers of all nodes, before the first
                                  start and when one of them was lost (default 600)
  --grace-s SECONDS               time for the other workers to end after a failure (default 10)
  --heartbeat-timeout-s SECONDS   a launcher of another node counts as lost if it is silent for this
                                  time. A worker counts as lost if it is stopped (SIGSTOP) for this
                                  time, or, if it uses Paceline, keeps Python's lock for this
                                  time (default 30; 0: no limit)
  --collective-timeout-s SECONDS  if a worker that uses Paceline waits in a collective operation
                                  for this time, the group ends; the output names the missing
                                  ranks and has the stacks of all (default 1800; 0: no limit)
"""

# Options of torchrun missing here: distinguished from misspelled options.
_NOT_OFFERED = frozenset(
    {
        "--event-log-handler",
        "--local-addr",
        "--local-ranks-filter",
        "--log-dir",
        "--log-line-prefix-template",
        "--logs-specs",
        "--module",
        "--monitor-interval",
        "--no-python",
        "--numa-binding",
        "--rdzv-backend",
        "--rdzv-conf",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--redirects",
        "--role",
        "--run-path",
        "--shutdown-timeout",
        "--signals-to-handle",
        "--standalone",
        "--start-method",
        "--tee",
        "--use-agent-store",
        "--virtual-local-rank",
        "-r",
        "-t",
    }
)
_WORDS_FOR_WORKERS = ("auto", "cpu", "gpu")


class LaunchArgumentError(ValueError):
    """Raised when the launcher's command line is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of the command line; None for options not given.

    `num_workers` is a number, a pair of bounds, or one of "auto", "cpu" and "gpu".
    """

    num_workers: int | tuple[int, int] | str | None = None
    tensor_parallel_size: int = 1
    max_restarts: int = 0
    num_nodes: int = 1
    node_rank: int = 0
    master_address: str | None = None
    master_port: int | None = None
    grace_s: float = 10.0
    heartbeat_timeout_s: float = 30.0
    collective_timeout_s: float = 1800.0
    nodes_timeout_s: float = 600.0
    wants_help: bool = False


def parse_arguments(arguments: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """Split a command line into the launcher's options and the program with its arguments.

    Raises:
        LaunchArgumentError: An option is unknown, not offered yet or has a wrong value, or there
            is no program.
    """
    options = LaunchOptions()
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("--", "-m"):
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return replace(options, wants_help=True), []
        name, has_value, value = word.partition("=")
        # Both spellings, as torchrun takes them.
        name = name.replace("_", "-")
        field, read = _known_option(name, word)
        if not has_value:
            if not rest or rest[0] == "--":
                raise LaunchArgumentError(f"The option `{name}` must have a value, but got none.")
            value = rest.pop(0)
        options = replace(options, **{field: read(name, value)})
    if rest and rest[0] == "--":
        rest.pop(0)
    if not rest:
        raise LaunchArgumentError(
            "empty script: a program must follow the options, but got none."
            " Hint: end the command line with `train.py` and its arguments."
        )
    if rest[0] == "--trial" or rest[0].startswith("--trial="):
        raise _legacy_trial()
    return _checked_arguments(options), rest


def _known_option(name: str, word: str) -> tuple[str, Callable[[str, str], Any]]:
    if name == "--trial":
        raise _legacy_trial()
    if name in _NOT_OFFERED:
        hint = " Hint: write `-m package.module`." if name == "--module" else ""
        raise LaunchArgumentError(f"The option `{name}` is not offered yet.{hint}")
    if name not in _OPTIONS:
        raise LaunchArgumentError(
            f"unrecognized arguments: `{word}` is not an option of the launcher, which has"
            f" {', '.join(sorted(_OPTIONS))}. Hint: options of the program follow its name."
        )
    return _OPTIONS[name]


def _legacy_trial() -> LaunchArgumentError:
    return LaunchArgumentError(
        "The form `--trial module:Class` is not offered. Hint: write a script that builds the"
        " trial and calls its trainer, and launch that."
    )


def _whole_number(name: str, value: str) -> int:
    # `int` would take signs, spaces and underscores too.
    if not value.isascii() or not value.isdigit():
        raise LaunchArgumentError(f"`{name}` must be a whole number, but got {value!r}.")
    return int(value)


def _num_workers(name: str, value: str) -> int | tuple[int, int] | str:
    if value in _WORDS_FOR_WORKERS:
        return value
    bounds = [int(part) if part.isascii() and part.isdigit() else 0 for part in value.split(":")]
    if len(bounds) > 2 or bounds[0] < 1 or bounds[-1] < bounds[0]:
        raise LaunchArgumentError(
            f"`{name}` must be a number from 1 on, LEAST:MOST, or auto, cpu or gpu, but got"
            f" {value!r}."
        )
    return bounds[0] if len(bounds) == 1 else (bounds[0], bounds[1])


def _num_nodes(name: str, value: str) -> int:
    if ":" in value:
        raise LaunchArgumentError(
            f"`{name}` must be one number, but got {value!r}: an elastic range of nodes is not"
            " offered yet."
        )
    return _whole_number(name, value)


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        # Any text is refused below, like a number out of range.
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise LaunchArgumentError(f"`{name}` must be seconds from 0 on, but got {value!r}.")
    return seconds


def _address(name: str, value: str) -> str:
    if not value:
        raise LaunchArgumentError(f"`{name}` must be an address, but got {value!r}.")
    return value


_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "--collective-timeout-s": ("collective_timeout_s", _seconds),
    "--grace-s": ("grace_s", _seconds),
    "--heartbeat-timeout-s": ("heartbeat_timeout_s", _seconds),
    "--master-addr": ("master_address", _address),
    "--master-port": ("master_port", _whole_number),
    "--max-restarts": ("max_restarts", _whole_number),
    "--nodes-timeout-s": ("nodes_timeout_s", _seconds),
    "--nnodes": ("num_nodes", _num_nodes),
    "--node-rank": ("node_rank", _whole_number),
    "--nproc-per-node": ("num_workers", _num_workers),
    "--tensor-parallel-size": ("tensor_parallel_size", _whole_number),
}


def _checked_arguments(options: LaunchOptions) -> LaunchOptions:
    if options.num_nodes < 1:
        raise LaunchArgumentError(f"`--nnodes` must be at least 1, but got {options.num_nodes}.")
    if options.node_rank >= options.num_nodes:
        raise LaunchArgumentError(
            f"`--node-rank` must be below `--nnodes` ({options.num_nodes}), but got"
            f" {options.node_rank}."
        )
    is_elastic = isinstance(options.num_workers, tuple)
    if options.num_nodes > 1 and is_elastic:
        raise LaunchArgumentError(
            "`--nproc-per-node LEAST:MOST` is not offered yet for several nodes, but got --nnodes"
            f" {options.num_nodes}. Hint: give the same number on each node."
        )
    _check_tensor_size(options)
    if 0 < options.heartbeat_timeout_s < LEAST_HEARTBEAT_TIMEOUT_S:
        raise LaunchArgumentError(
            f"`--heartbeat-timeout-s` must be 0 or at least {LEAST_HEARTBEAT_TIMEOUT_S:g} second,"
            f" but got {options.heartbeat_timeout_s:g}."
        )
    if options.num_nodes > 1 and options.master_address is None:
        raise LaunchArgumentError(
            f"`--master-addr` must be given for {options.num_nodes} nodes, but is missing."
            " Hint: give every node the address of node 0."
        )
    if options.master_port is not None and not 0 <= options.master_port < 65536:
        raise LaunchArgumentError(
            f"`--master-port` must be below 65536, but got {options.master_port}."
        )
    return options


def _check_tensor_size(options: LaunchOptions) -> None:
    """Check the given numbers of workers for divisibility into tensor-parallel groups."""
    size, given = options.tensor_parallel_size, options.num_workers
    if size < 1:
        raise LaunchArgumentError(f"`--tensor-parallel-size` must be at least 1, but got {size}.")
    if isinstance(given, tuple):
        # Lower bound alone: a single process trains whole models; spare workers above it wait.
        is_fitting = given[0] == 1 or given[0] % size == 0
    else:
        # A number that the launcher chooses is rounded to fit.
        num_workers = given * options.num_nodes if isinstance(given, int) else 1
        is_fitting = num_workers == 1 or num_workers % size == 0
    if not is_fitting:
        raise LaunchArgumentError(
            "`--nproc-per-node` must be a multiple of `--tensor-parallel-size`"
            f" ({size}), or 1, but got {given}."
        )


_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?\Z")
_FLAGS_ALONE = frozenset("bBdEIOPqsuvx")
_FLAGS_WITH_VALUE = frozenset("WX")
_PROGRAM_FLAGS = {"m": "module", "c": "code"}


def worker_command(program: Sequence[str]) -> WorkerCommand:
    """Return the command to run a program as a worker.

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
    """Return the interpreter for a name; a bare name of the running version means this process's.

    It is the one that has Paceline, while the PATH may lead to another.
    """
    version = name.removeprefix("python")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    is_bare = os.sep not in name
    return sys.executable if is_bare and version in ("", own, own.split(".")[0]) else name


def _split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words after an interpreter into its flags and the program to run."""
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
    """Return the command to run a Python program in the wrapper, or None if impossible."""
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
        # Standard input and directories are left to Python itself.
        return None
    else:
        kind, arguments = "script", target
        if not Path(first).is_file():
            raise LaunchArgumentError(
                f"The script must exist, but there is no file {first!r} in {os.getcwd()!r}."
            )
    command = (interpreter, *flags, PROGRAM_FILE, kind, *arguments)
    return WorkerCommand(arguments=command, is_python=True)


class Backend:
    """Back end of the launcher; the base class needs nothing more than torch.distributed.

    Override `open` in back ends that do.

    Args:
        launcher: The name of the launcher's module.
    """

    def __init__(self, launcher: str) -> None:
        self.launcher = launcher

    @contextmanager
    def open(self, options: LaunchOptions) -> Iterator[WorkerVariables]:
        """Yield a function for the variables of the workers, for as long as they run.

        Raises:
            LaunchArgumentError: The back end cannot satisfy the options.
        """
        yield lambda layout: ()


def check_installed(package: str, launcher: str, hint: str) -> None:
    """Check whether a package can be imported, without importing the package.

    Raises:
        LaunchArgumentError: It cannot.
    """
    if find_spec(package) is None:
        raise LaunchArgumentError(
            f"`paceline.launch.{launcher}` needs the package `{package}`, which is not installed."
            f" Hint: {hint}; see docs/backends.md."
        )
