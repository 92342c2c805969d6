"""Processes that a fork server starts, so that none takes the time to load its modules."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any


class _Forked:
    """A process of a fork server, used like those of `subprocess`.

    Args:
        server: The server.
        files: Its standard output and error.
        request: What the server is asked for.
    """

    def __init__(self, server: "ForkServer", files: list[int], request: dict[str, Any]) -> None:
        self._server = server
        self.returncode: int | None = None
        self.pid = server.ask(request, files)

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None:
            with suppress(TimeoutError):
                self.returncode = self._server.wait(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code."""
        if self.returncode is None:
            self.returncode = self._server.wait(self.pid, 300 if timeout is None else timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class ForkedProcess(_Forked):
    """A process of a fork server whose output is read; `is_one_stream` puts its errors there."""

    def __init__(self, server: "ForkServer", is_one_stream: bool, **request: Any) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 # see `kill`
        output, own_end = os.pipe()
        self.stdout = os.fdopen(output)
        errors = own_end if is_one_stream else self._errors.fileno()
        super().__init__(server, [own_end, errors], request)
        os.close(own_end)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        super().kill()
        self.wait(60)
        self.stdout.close()
        self._errors.close()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end and return its standard output and error."""
        timer = threading.Timer(timeout, os.kill, [self.pid, signal.SIGKILL])
        timer.start()
        try:
            # What it has started may hold the pipe open, but not for long.
            output = self.stdout.read()
            self.wait(timeout)
        finally:
            timer.cancel()
            timer.join()
        self._errors.seek(0)
        return output, self._errors.read()


class ForkedDaemon(_Forked):
    """A process of a fork server that leads a session and writes to a file."""

    def __init__(self, server: "ForkServer", output: IO[bytes], **request: Any) -> None:
        super().__init__(server, 2 * [output.fileno()], {**request, "has_session": True})


class ForkServer:
    """A process that forks others, so that each has modules loaded from its beginning.

    Attributes:
        environment: That of the server itself, in which it has found the modules.
    """

    def __init__(self, *modules: str) -> None:
        self.environment = dict(os.environ)
        self._channel, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        program = Path(__file__).with_name("fork_server.py")
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, program, str(remote.fileno()), *modules],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def start(
        self,
        *command: str,
        directory: Path,
        environment: dict[str, str],
        has_session: bool = False,
        is_one_stream: bool = False,
    ) -> ForkedProcess:
        """Start a script, or a module after "-m", with arguments."""
        return ForkedProcess(
            self,
            is_one_stream,
            command=command,
            directory=str(directory),
            environment=environment,
            has_session=has_session,
        )

    def run_to_end(
        self,
        *command: str,
        directory: Path,
        environment: dict[str, str],
        timeout_s: float = 240,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a script, or a module after "-m", with arguments."""
        process = self.start(*command, directory=directory, environment=environment)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode or 0, output, errors)

    def start_daemon(
        self, *command: str, output: IO[bytes], environment: dict[str, str]
    ) -> ForkedDaemon:
        """Start a script, or a module after "-m", in a session of its own."""
        return ForkedDaemon(
            self, output, command=command, directory=str(Path.cwd()), environment=environment
        )

    def ask(self, request: dict[str, Any], files: list[int]) -> int:
        """Have a process forked, and return its id."""
        socket.send_fds(self._channel, [json.dumps(request).encode()], files)
        # The first one waits for the modules.
        while "code" in (told := self._receive(240)):
            self._codes[told["pid"]] = told["code"]
        # It may be the id of one that ended before, whose code nobody has asked for.
        self._codes.pop(told["pid"], None)
        return told["pid"]

    def wait(self, pid: int, timeout_s: float) -> int:
        """Return the exit code of a process, at the latest after a time."""
        return self.wait_for_any({pid}, timeout_s)[1]

    def wait_for_any(self, pids: set[int], timeout_s: float) -> tuple[int, int]:
        """Return the first of some processes to end, and its exit code."""
        deadline = time.monotonic() + timeout_s
        while (pid := next((pid for pid in self._codes if pid in pids), None)) is None:
            told = self._receive(max(deadline - time.monotonic(), 0.001))
            self._codes[told["pid"]] = told["code"]
        return pid, self._codes.pop(pid)

    def close(self) -> None:
        """End the server, whose processes have ended."""
        self._channel.close()
        self._process.wait(60)

    def _receive(self, timeout_s: float) -> dict[str, int]:
        self._channel.settimeout(timeout_s)
        told: dict[str, int] = json.loads(self._channel.recv(1000))
        return told


class MasterServer(ForkServer):
    """Forks masters, so that each has loaded what it needs."""

    def start_master(self, home: Path, *options: object) -> ForkedDaemon:
        """Start `paceline up` on a home, and wait until it answers."""
        home.mkdir(parents=True, exist_ok=True)
        (home / "master.json").unlink(missing_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        command = ["-m", "paceline.cli", "up", "--home", str(home), *map(str, options)]
        with (home / "master.log").open("ab") as log:
            master = self.start_daemon(*command, output=log, environment=kept)
        deadline = time.monotonic() + 240
        while not (home / "master.json").exists():
            is_in_time = time.monotonic() < deadline and master.poll() is None
            assert is_in_time, (home / "master.log").read_text()
            time.sleep(0.02)
        return master


class RankServer(ForkServer):
    """Forks the ranks of a script, so that none of them takes the time to load torch."""

    def run(
        self,
        num_ranks: int,
        script: str | Path,
        *arguments: str,
        directory: Path,
        environment: dict[str, str],
        timeout_s: float = 180,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a script as torchrun does: if a rank fails, the others must end soon, too.

        Returns:
            The code of the first rank to fail, and what all ranks have written.
        """
        command = [str(script), *arguments]
        with tempfile.TemporaryFile("w+") as output:
            code = self.run_into(
                2 * [output.fileno()], num_ranks, command, str(directory), environment, timeout_s
            )
            output.seek(0)
            return subprocess.CompletedProcess(command, code, output.read(), "")

    def run_into(
        self,
        files: list[int],
        num_ranks: int,
        command: list[str],
        directory: str,
        environment: dict[str, str],
        timeout_s: float = 180,
    ) -> int:
        """Do the same with standard output and error of one's own; return the code."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
        place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
        request = {"command": command, "directory": directory}
        deadline = time.monotonic() + timeout_s
        running = {
            self.ask(
                {
                    **request,
                    "environment": {
                        **environment, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)
                    },
                },
                files,
            )
            for rank in range(num_ranks)
        }  # fmt: skip
        code = 0
        try:
            while running:
                pid, ended = self.wait_for_any(running, deadline - time.monotonic())
                running.remove(pid)
                if ended and not code:
                    code = ended
                    # A rank may have to say yet that another one has failed.
                    deadline = time.monotonic() + 30
        except TimeoutError:
            if not code:
                raise
        finally:
            _kill(running)
        return code


class RankService:
    """Forks ranks for programs that ask for them, one after the other.

    A program is `fork_ranks.py` with the address of the socket, the number, a script and its
    arguments; it ends as the ranks do. Meanwhile nobody else may use the server.
    """

    program = Path(__file__).with_name("fork_ranks.py")

    def __init__(self, server: RankServer, address: Path) -> None:
        self._server = server
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(address))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="rank-service")
        self._thread.start()

    def close(self) -> None:
        """End the service."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                channel, _ = self._socket.accept()
            except OSError:
                return
            with channel:
                message, files, _, _ = socket.recv_fds(channel, 1 << 20, 2)
                try:
                    code = self._server.run_into(files, **json.loads(message))
                except TimeoutError:
                    code = 124
                for file in files:
                    os.close(file)
                with suppress(OSError):
                    channel.send(str(code if code >= 0 else 128 - code).encode())


def _kill(processes: set[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_ports(number: int) -> int:
    """Return the first of some ports in a row that are free."""
    while True:
        # Tests seed the common generator.
        first = random.SystemRandom().randrange(25_000, 32_000)
        with ExitStack() as probes, suppress(OSError):
            for port in range(first, first + number):
                probes.enter_context(socket.create_server(("", port)))
            return first
