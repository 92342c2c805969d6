"""Commands `paceline notebook`, `shell`, `tensorboard` and `open`: interactive work on slots."""

import fcntl
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._completions import complete_pool
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError
from paceline.cli._experiment_description import waits_for

if TYPE_CHECKING:
    from paceline.client._client import Client
    from paceline.client._experiment_and_trial import Experiment

Slots = Annotated[int, typer.Option(min=1, metavar="N", help="Slots of one machine that it holds.")]
InPool = Annotated[
    str | None,
    typer.Option("--pool", metavar="POOL", help="Pool of nodes.", autocompletion=complete_pool),
]
Named = Annotated[str | None, typer.Option(metavar="TEXT", help="Name in lists.")]
IdleAfter = Annotated[
    str, typer.Option("--idle", metavar="AGE", help="End it after so long without use.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Start it, but do not open it.")]
InProject = Annotated[
    str | None, typer.Option(metavar="NAME", help="Project. Default: your first one.")
]
Python = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Interpreter there. Default: the one of the runner."),
]
LocalPort = Annotated[
    int, typer.Option(min=0, max=65535, metavar="PORT", help="Port here; 0 is a free one.")
]
WorkDirectory = Annotated[
    Path,
    typer.Argument(help="Directory to work in, on the machine with the slots.", metavar="DIR"),
]

_PROGRAM = "paceline.launch.interactive"
_LOOK_S = 1.0
# What leaves a shell, and leaves it running: Ctrl-], as of telnet.
_LEAVE = 0x1D
_END_OF_INPUT = b"\x04"
_MOST_TRIALS = 200


class _Wish(NamedTuple):
    """An interactive task to start."""

    kind: str
    slots: int
    pool: str | None
    name: str | None
    idle: str
    project: str | None
    python: str | None = None
    directory: Path | None = None
    words: Sequence[str] = ()

    def config(self) -> dict[str, Any]:
        """Return the config of the experiment."""
        directory = None if self.directory is None else str(self.directory.absolute())
        # No template: the program becomes another one. A kernel has nothing to store on a pause.
        environment = {"python": self.python, "working_dir": directory, "warm": False}
        return {
            "name": self.name or self.kind,
            "entrypoint": ["python3", "-m", _PROGRAM, self.kind, *self.words],
            "searcher": {"name": "single", "metric": "none"},
            "resources": {"slots_per_trial": self.slots, "pool": self.pool},
            "max_restarts": 0,
            "preemption_timeout": 10.0,
            "environment": environment,
            "interactive": {"kind": self.kind, "idle_timeout": self.idle},
        }


def notebook(
    directory: WorkDirectory = Path(),
    slots: Slots = 1,
    pool: InPool = None,
    name: Named = None,
    idle: IdleAfter = "1h",
    detach: Detach = False,
    python: Python = None,
    project: InProject = None,
    port: LocalPort = 0,
) -> None:
    """Run JupyterLab on slots, and print a link on this machine that opens it.

    Ctrl-C ends only this command. A page that is left open does not keep it: cells and terminals
    that run do.
    """
    wish = _Wish("notebook", slots, pool, name, idle, project, python, directory)
    _start(wish, is_detached=detach, port=port)


def shell(
    directory: WorkDirectory = Path(),
    slots: Slots = 1,
    pool: InPool = None,
    name: Named = None,
    idle: IdleAfter = "1h",
    detach: Detach = False,
    python: Python = None,
    project: InProject = None,
) -> None:
    """Run a shell on slots, in this terminal.

    Ctrl-] leaves it running, and `paceline open` comes back. Its end gives the slots back. The exit
    code is that of the shell.
    """
    _start(_Wish("shell", slots, pool, name, idle, project, python, directory), is_detached=detach)


def tensorboard(
    experiments: Annotated[
        list[int] | None, typer.Argument(help="Numbers of experiments.", metavar="[ID]...")
    ] = None,
    trials: Annotated[
        list[int] | None,
        typer.Option("--trial", metavar="ID", help="Number of a trial. Repeatable."),
    ] = None,
    slots: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Slots to run on; 0 is this machine, which needs the files."
        ),
    ] = 0,
    pool: InPool = None,
    name: Named = None,
    idle: IdleAfter = "1h",
    detach: Detach = False,
    python: Python = None,
    project: InProject = None,
    port: LocalPort = 0,
) -> None:
    """Show the TensorBoard files of trials, those that have begun by now.

    The files lie in the checkpoint storage, which must be seen where TensorBoard runs.
    """
    with connect() as client:
        places = _log_directories(client, experiments or [], trials or [])
    if slots:
        words = [f"{each}={place}" for each, place in places.items()]
        wish = _Wish("tensorboard", slots, pool, name, idle, project, python, words=words)
        _start(wish, is_detached=detach, port=port)
        return
    if detach or pool is not None:
        raise CommandError("`--detach` and `--pool` must come with `--slots`. Hint: `--slots 1`.")
    _serve_here(places, port)


def open_task(experiment: options.ExperimentId, port: LocalPort = 0) -> None:
    """Open a notebook, a shell or a TensorBoard of yours that runs on slots."""
    with connect() as client:
        _open(client, client.get_experiment(experiment), port)


def _start(wish: _Wish, *, is_detached: bool, port: int = 0) -> None:
    with connect() as client:
        experiment = client.create_experiment(wish.config(), project=wish.project)
        slots = f"{wish.slots} slot{'s' * (wish.slots > 1)}"
        told = f"Created the {wish.kind} {experiment.id} with {slots}."
        if is_detached:
            _print_task(experiment, wish.kind, None, told)
            console.print_hint(f"`paceline open {experiment.id}` opens it.")
            return
        console.print_note(told)
        _open(client, experiment, port)


def _print_task(
    experiment: "Experiment | None",
    kind: str,
    url: str | None,
    text: str,
    code: int | None = None,
) -> None:
    number = None if experiment is None else experiment.id
    document = {"experiment_id": number, "kind": kind, "url": url, "exit_code": code}
    console.print_answer(document, text)


def _open(client: "Client", experiment: "Experiment", port: int) -> None:
    """Wait for a task, and open it until it or this command ends."""
    number = experiment.id
    try:
        link = _await_link(client, experiment)
        if link.kind == "shell":
            _use_shell(client, experiment)
        else:
            _use_browser(client, experiment, link.kind, link.path, port)
    except KeyboardInterrupt:
        experiment.reload()
        if not experiment.data.state.is_terminal:
            console.print_hint(f"It goes on. `paceline open {number}` opens it, `paceline e kill"
                               f" {number}` ends it.")  # fmt: skip
        raise


def _await_link(client: "Client", experiment: "Experiment") -> Any:
    from paceline.client._http_session import ApiError

    told = None
    while True:
        data = experiment.reload().data
        if data.state.is_terminal:
            raise CommandError(_end_text(experiment))
        if not data.num_running:
            reason = waits_for(client, data) or console.experiment_word(data)
            if reason != told:
                told = reason
                console.print_note(f"Waiting: {reason}")
            time.sleep(_LOOK_S)
            continue
        try:
            link = client.interactive_link(experiment.id)
        except ApiError as error:
            # It may end meanwhile, which the next look tells better.
            if error.code != "not_running":
                raise
            time.sleep(_LOOK_S)
            continue
        if link.path is not None:
            return link


def _end_text(experiment: "Experiment") -> str:
    trial = next(iter(experiment.trials(limit=1)), None)
    why = experiment.data.error or (trial and (trial.data.error or trial.data.stop_reason))
    state = console.experiment_word(experiment.data) + (f" ({why})" if why else "")
    return (
        f"The task of experiment {experiment.id} must run, but is {state}."
        f" Hint: see `paceline e logs {experiment.id}`."
    )


def _use_browser(
    client: "Client", experiment: "Experiment", kind: str, path: str, port: int
) -> None:
    # A job is a stranger: nothing but a path of the local page.
    if not (path.startswith("/") and path.isascii() and path.isprintable()):
        raise CommandError(f"The link of the {kind} must be a path, but got {path!r}.")
    try:
        tunnel = client.open_tunnel(experiment.id, port)
    except OSError as error:
        raise CommandError(
            f"`--port` must be free on this machine, but {port} is not ({error.strerror})."
            " Hint: leave it out."
        ) from error
    with tunnel:
        url = f"{tunnel.url}{path}"
        text = f"Open {url}\nThe link works as long as this command runs; Ctrl-C ends it."
        _print_task(experiment, kind, url, text)
        sys.stdout.flush()
        next_look = 0.0

        def is_wanted() -> bool:
            nonlocal next_look
            if time.monotonic() < next_look:
                return True
            next_look = time.monotonic() + _LOOK_S
            return _still_runs(experiment)

        tunnel.serve(is_wanted)
    _tell_end(experiment)


def _still_runs(experiment: "Experiment") -> bool:
    from paceline.client._http_session import MasterUnreachableError

    # One that is started again finds the task again.
    with suppress(MasterUnreachableError):
        experiment.reload()
    return not experiment.data.state.is_terminal


def _tell_end(experiment: "Experiment") -> None:
    if experiment.data.state.value != "COMPLETED":
        raise CommandError(_end_text(experiment))
    trial = next(iter(experiment.trials(limit=1)), None)
    reason = None if trial is None else trial.data.stop_reason
    console.print_note(f"It has ended{f': {reason}' if reason else ''}.")


def _use_shell(client: "Client", experiment: "Experiment") -> None:
    if not options.is_json():
        console.print_note("Ctrl-] leaves the shell and keeps it.")
    with _raw_terminal() as size_changes:
        code = None
        # A master that was started again has lost the stream, not the shell.
        while code is None and _still_runs(experiment):
            with client.connect_to_task(experiment.id) as stream:
                code = _pass_keys(stream, size_changes)
            if code is None:
                time.sleep(_LOOK_S)
    if code is None:
        _tell_end(experiment)
    _print_task(experiment, "shell", None, f"The shell has ended with {code}.", code)
    raise typer.Exit(code or 0)


@contextmanager
def _raw_terminal() -> Iterator[int]:
    """Have the terminal pass all keys on; yield a descriptor that tells of its new sizes."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    waker = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        if before is not None:
            # What was typed ahead is kept.
            tty.setraw(sys.stdin, termios.TCSADRAIN)
        yield read_end
    finally:
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGWINCH, handler)
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        os.close(read_end)
        os.close(write_end)


def _pass_keys(stream: socket.socket, size_changes: int) -> int | None:
    """Pass keys and output on; return the exit code of the shell, None if the stream ended.

    Raises:
        KeyboardInterrupt: The user leaves.
    """
    from paceline.launch.interactive import SIZE

    received, keyboard = bytearray(), sys.stdin.fileno()
    is_terminal = sys.stdin.isatty()
    sources = [stream, size_changes, keyboard]
    if is_terminal:
        _send_frame(stream, SIZE, _terminal_size())
    while True:
        can_read, _, _ = select.select(sources, [], [])
        if size_changes in can_read and os.read(size_changes, 64) and is_terminal:
            _send_frame(stream, SIZE, _terminal_size())
        if keyboard in can_read and not _pass_typed(stream, keyboard, is_terminal=is_terminal):
            sources.remove(keyboard)
        if stream in can_read:
            data = stream.recv(64 * 1024)
            received += data
            code = _show_frames(received)
            if code is not None or not data:
                return code


def _pass_typed(stream: socket.socket, keyboard: int, *, is_terminal: bool) -> bool:
    """Pass on what was typed; return False at the end of a file."""
    from paceline.launch.interactive import DATA

    keys = os.read(keyboard, 4096)
    if is_terminal and _LEAVE in keys:
        raise KeyboardInterrupt
    _send_frame(stream, DATA, keys or _END_OF_INPUT)
    return bool(keys)


def _show_frames(received: bytearray) -> int | None:
    """Print the output that has arrived as whole frames; return the exit code if it is there."""
    from paceline.launch.interactive import DATA, EXIT, read_frames

    for kind, content in read_frames(received) or ():
        if kind == EXIT and len(content) == 4:
            (code,) = struct.unpack(">i", content)
            return int(code) if code >= 0 else 128 - int(code)
        if kind == DATA and not options.is_json():
            os.write(sys.stdout.fileno(), content)
    return None


def _send_frame(stream: socket.socket, kind: bytes, content: bytes) -> None:
    from paceline.launch.interactive import HEAD

    # A broken stream is noticed by the next read.
    with suppress(OSError):
        stream.sendall(HEAD.pack(kind, len(content)) + content)


def _terminal_size() -> bytes:
    size = fcntl.ioctl(sys.stdin.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    rows, columns = struct.unpack("HHHH", size)[:2]
    return struct.pack(">HH", rows, columns)


def _log_directories(
    client: "Client", experiments: Sequence[int], trials: Sequence[int]
) -> dict[str, str]:
    """Return where trials keep their TensorBoard files, by their names there.

    Raises:
        CommandError: None is named, or there is no such place.
    """
    from paceline.config._validate_config import validate_config

    found = [client.get_trial(number) for number in trials]
    for number in experiments:
        found += client.get_experiment(number).trials(limit=_MOST_TRIALS)
    if not found:
        raise CommandError(
            "Experiments or trials that have begun must be given, but got none. Hint: `paceline"
            " tensorboard 3`, or `--trial 7`."
        )
    info, places = client.master(), {}
    for trial in found:
        config = validate_config(trial.experiment().data.config)
        storage = config.checkpoint_storage
        root = f"{info.home}/checkpoints" if storage is None else str(storage.root)
        place = f"{root.removeprefix('file://')}/tensorboard/{info.cluster_id}/trial_{trial.id}"
        if "," in place:
            raise CommandError(f"A path for TensorBoard must be without commas, but got {place!r}.")
        places[f"trial_{trial.id}"] = place
    return places


def _serve_here(places: dict[str, str], port: int) -> None:
    from importlib.util import find_spec

    from paceline.launch.interactive import missing_text, serve_tensorboard

    if find_spec("tensorboard") is None:
        raise CommandError(missing_text("tensorboard"))
    seen = [f"{n}={place}" for n, place in places.items() if "://" in place or Path(place).is_dir()]
    if not seen:
        raise CommandError(
            f"TensorBoard files must be seen on this machine, but {next(iter(places.values()))!r}"
            " is not there. Hint: trials write them with `tensorboard_mode`; `--slots 1` shows what"
            " a runner sees."
        )

    def tell(url: str) -> None:
        _print_task(None, "tensorboard", url, f"Open {url}\nCtrl-C ends it.")

    raise typer.Exit(serve_tensorboard(seen, port=port, tell=tell))
