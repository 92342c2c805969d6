"""Program of interactive work: ``python3 -m paceline.launch.interactive notebook``, for example.

It listens on the socket `task.sock` in the run directory, which only its own Unix user can open.
The runner passes the bytes of the task's owner on to it.
"""

import atexit
import fcntl
import os
import pty
import pwd
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE

SOCKET_NAME = "task.sock"
DATA, SIZE, EXIT = b"d", b"w", b"x"
"""Kinds of frames between a shell and a terminal: a letter, the length, the content."""
HEAD = struct.Struct(">cI")
_MAX_FRAME = 64 * 1024
_READ_BYTES = 16 * 1024
# What a terminal that comes back is shown of the output before.
_KEPT_BYTES = 64 * 1024
# A terminal that reads slowly holds up the shell, as any terminal does.
_MAX_UNSENT = 256 * 1024
_LOOK_S = 1.0
_LAST_WORDS_S = 5.0
_PAUSE_S = 0.02
_NO_SHELLS = ("nologin", "false")


def main(words: Sequence[str]) -> int:
    """Run a notebook, a shell or a TensorBoard, and return the exit code."""
    kind, *arguments = words
    # What runs inside is no trial: runs that it makes are runs of their own.
    run = Path(os.environ.pop(RUN_DIRECTORY_VARIABLE))
    place = str(run / SOCKET_NAME)
    with suppress(FileNotFoundError):
        os.unlink(place)
    if kind == "shell":
        return Shell(place).run()
    if find_spec(_PROGRAMS[kind][1]) is None:
        print(missing_text(kind), file=sys.stderr)
        return 1
    if kind == "tensorboard":
        os.umask(0o077)
        return serve_tensorboard(arguments, socket_place=place)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", f"--ServerApp.sock={place}"),
        *("--ServerApp.sock_mode=0600", f"--ServerApp.root_dir={os.getcwd()}"),
        # Jupyter wants to hear that somebody is root on purpose; whoever started the runner is.
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]
    sys.stdout.flush()
    # The one process of the attempt: its end is the attempt's.
    os.execv(sys.executable, command)  # noqa: S606 - no shell
    raise AssertionError("`execv` returns only by an error")


# Name and package of what runs.
_PROGRAMS = {
    "notebook": ("JupyterLab", "jupyterlab"),
    "tensorboard": ("TensorBoard", "tensorboard"),
}


def missing_text(kind: str) -> str:
    """Return the message about an interpreter without the package of a kind of task."""
    name, package = _PROGRAMS[kind]
    return (
        f"{name} must be installed for the interpreter {sys.executable!r}, but is not. Hint:"
        f" `{sys.executable} -m pip install {package}`, or name another one by `--python`."
    )


def serve_tensorboard(
    places: Sequence[str],
    *,
    socket_place: str = "",
    port: int = 0,
    tell: Callable[[str], object] = print,
) -> int:
    """Serve TensorBoard until it is ended.

    Args:
        places: The log directories, as NAME=PATH.
        socket_place: The Unix socket to listen on; without one, a port of loopback.
        port: The port; 0 for a free one.
        tell: Gets its URL.
    """
    # Its modules take seconds to load.
    from tensorboard import default, program

    class Server(program.WerkzeugServer):  # type: ignore[misc] # without types
        def get_url(self) -> str:
            return str(super().get_url()) if not socket_place else "the socket of the task"

    board = program.TensorBoard(default.get_plugins(), server_class=Server)
    host = f"unix://{socket_place}" if socket_place else "127.0.0.1"
    options = ["--host", host, "--port", str(port), "--load_fast=false"]
    board.configure(["tensorboard", *_log_options(places), *options])
    try:
        tell(board.launch())
        sys.stdout.flush()
    except program.TensorBoardServerException as error:
        print(error.msg, file=sys.stderr)
        return 1
    while True:
        signal.pause()


def _log_options(places: Sequence[str]) -> list[str]:
    """Return the options that name log directories, or URLs of buckets, to TensorBoard."""
    named = dict(place.split("=", 1) for place in places)
    if any("://" in place for place in named.values()):
        return ["--logdir_spec", ",".join(f"{name}:{place}" for name, place in named.items())]
    # Names of directories become names of runs as they are.
    directory = tempfile.mkdtemp(prefix="tensorboard-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name, place in named.items():
        os.symlink(place, os.path.join(directory, os.path.basename(name)))
    return ["--logdir", directory]


class Shell:
    """Shell on a terminal of its own, which several connections show; it lives on without any.

    Args:
        place: The socket that it listens on.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o077)
        self._listener.bind(place)
        os.umask(mask)
        self._listener.listen()
        self._terminals: dict[int, _Terminal] = {}
        self._kept = bytearray()
        # What was typed and not yet read by the program that runs.
        self._typed = bytearray()
        self._touched_at = 0.0
        self._pid = self._master = -1

    def run(self) -> int:
        """Serve until the shell ends; its exit code goes to the connections."""
        signal.signal(signal.SIGTERM, lambda *_: self._signal(signal.SIGHUP))
        program = _login_shell()
        self._pid, self._master = pty.fork()
        if self._pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "SHELL": program}
            os.execve(program, [program, "-i"], environment)  # noqa: S606 - a shell of the user
        os.set_blocking(self._master, False)
        print(f"The shell {program} runs in {os.getcwd()}.", flush=True)
        # Programs that it left in the background may keep the terminal open.
        while not (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            self._turn()
        self._show()
        self._say_goodbye(os.waitstatus_to_exitcode(ended[1]))
        return 0

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _turn(self) -> None:
        """Pass on what there is."""
        all_terminals = [*self._terminals.values()]
        readers: list[Any] = [self._listener]
        writers: list[Any] = [one for one in all_terminals if one.unsent]
        if all(len(one.unsent) <= _MAX_UNSENT for one in all_terminals):
            readers.append(self._master)
        if len(self._typed) <= _MAX_FRAME:
            readers += all_terminals
        if self._typed:
            writers.append(self._master)
        can_read, can_write, _ = select.select(readers, writers, [], _LOOK_S)
        if self._listener in can_read:
            connection, _ = self._listener.accept()
            self._terminals[connection.fileno()] = _Terminal(connection, bytes(self._kept))
        for one in all_terminals:
            frames = one.receive() if one in can_read else []
            is_open = frames is not None and (one not in can_write or one.send())
            for kind, content in frames or ():
                self._take(kind, content)
            if not is_open:
                del self._terminals[one.fileno()]
                one.close()
        if self._master in can_write:
            with suppress(OSError):
                del self._typed[: os.write(self._master, self._typed)]
        if self._master in can_read and not self._show():
            # The shell is about to be seen to have ended.
            time.sleep(_PAUSE_S)
        if can_read or self._is_at_work():
            self._touch()

    def _take(self, kind: bytes, content: bytes) -> None:
        if kind == DATA:
            self._typed += content
        elif kind == SIZE and len(content) == 4:
            rows, columns = struct.unpack(">HH", content)
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def _show(self) -> bool:
        try:
            data = os.read(self._master, _READ_BYTES)
        except OSError:
            return False  # so Linux says that nobody has the terminal open any more
        self._kept = (self._kept + data)[-_KEPT_BYTES:]
        for one in self._terminals.values():
            one.add(DATA, data)
        return bool(data)

    def _is_at_work(self) -> bool:
        """Return whether something else than the shell itself has the terminal."""
        with suppress(OSError):
            return os.tcgetpgrp(self._master) != self._pid
        return False

    def _touch(self) -> None:
        # The runner sees by it that the shell is used.
        if time.monotonic() - self._touched_at > _LOOK_S:
            self._touched_at = time.monotonic()
            with suppress(OSError):
                os.utime(self._place)

    def _say_goodbye(self, code: int) -> None:
        until = time.monotonic() + _LAST_WORDS_S
        for one in self._terminals.values():
            one.add(EXIT, struct.pack(">i", code))
        while self._terminals and time.monotonic() < until:
            _, can_write, _ = select.select([], [*self._terminals.values()], [], _LOOK_S)
            for one in can_write:
                if not one.send() or not one.unsent:
                    del self._terminals[one.fileno()]
                    one.close()


class _Terminal:
    """Connection of a terminal: frames in both directions."""

    def __init__(self, connection: socket.socket, before: bytes) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._received = bytearray()
        self.unsent = bytearray()
        for start in range(0, len(before), _MAX_FRAME):
            self.add(DATA, before[start : start + _MAX_FRAME])

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def add(self, kind: bytes, content: bytes) -> None:
        """Have a frame sent as soon as possible."""
        self.unsent += HEAD.pack(kind, len(content)) + content

    def send(self) -> bool:
        """Send what can be sent now; False if the connection is broken."""
        try:
            del self.unsent[: self._connection.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Return the frames that have arrived; None if the connection has ended or is abused."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError:
            return None
        self._received += data
        frames = read_frames(self._received)
        return None if frames is None or not data else frames


def read_frames(received: bytearray) -> list[tuple[bytes, bytes]] | None:
    """Take the whole frames off the bytes received; None if one is too long."""
    frames = []
    while len(received) >= HEAD.size:
        kind, length = HEAD.unpack_from(received)
        if length > _MAX_FRAME:
            return None
        if len(received) < HEAD.size + length:
            break
        frames.append((kind, bytes(received[HEAD.size : HEAD.size + length])))
        del received[: HEAD.size + length]
    return frames


def _login_shell(environment: Mapping[str, str] = os.environ) -> str:
    """Return the shell of the Unix user, or else the system's."""
    program = environment.get("SHELL") or pwd.getpwuid(os.geteuid()).pw_shell
    is_usable = os.access(program, os.X_OK) and os.path.basename(program) not in _NO_SHELLS
    return program if is_usable else "/bin/sh"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
