"""Starting the master as a process of its own, and seeing to its end."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from paceline._base.files import NotRegularFileError, open_private, regular_opener
from paceline._base.process_and_network import LOOPBACK, LOOPBACK_HOSTS, exit_code
from paceline.cli._errors import CommandError
from paceline.client._http_session import (
    HOME_VARIABLE,
    MASTER_VARIABLE,
    MasterFile,
    read_master_file,
)

if TYPE_CHECKING:
    import psutil

    from paceline.client._client import Client

_POLL_S = 0.05
# A master that starts uses the processor, however little it gets of it. The second limit is for one
# that works and never answers.
_SILENCE_S = 60.0
_START_TIMEOUT_S = 1800.0
_SAY_S = 15.0
_END_TIMEOUT_S = 15.0
NO_WEB_UI = (
    "There is no web UI: it was not built when Paceline was installed. The command line works"
    " without it. Hint: run `make ui` in the source directory, then `pip install"
    " --force-reinstall --no-deps .` there unless the installation is editable."
)


def start_detached(home: Path, arguments: list[str]) -> MasterFile:
    """Start `paceline up` in its own session and return once its master answers.

    Args:
        home: The master's home; its output goes to `master.log` there.
        arguments: Further arguments of `paceline up`.

    Raises:
        CommandError: The home cannot be written to, or the master ended, or does not answer and has
            done nothing for a minute.
    """
    log = home / "master.log"
    _make_log(home, log)
    start = log.stat().st_size if log.exists() else 0
    process = _start_process(home, log, arguments)
    life = _SignOfLife(process.pid)
    while not life.is_over():
        if process.poll() is not None:
            raise CommandError(_last_words(log, start))
        file = read_master_file(home)
        if file is not None and file.pid == process.pid and master_answers(file):
            # Nobody waits for this process: it outlives the command on purpose.
            process.returncode = 0
            return file
        if life.is_worth_a_line():
            typer.echo(
                f"Waiting for the master (process {process.pid}) to answer; it has used"
                f" {life.used_s:.1f} s of the processor. It writes to {log}.",
                err=True,
            )
        time.sleep(_POLL_S)
    process.terminate()
    exit_code(process)
    raise CommandError(
        f"The master must answer, but does not after {life.waited_s:.0f} s, and was ended: it has"
        f" used {life.used_s:.1f} s of the processor, the last of it {life.silence_s:.0f} s ago."
        f" Hint: see {str(log)!r}."
    )


def _make_log(home: Path, log: Path) -> None:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        open_private(log, "ab").close()
    except NotRegularFileError as error:
        raise CommandError(
            f"{str(log)!r} must be a regular file. Hint: move it away. The master makes a new one."
        ) from error
    except OSError as error:
        raise CommandError(
            f"A home must be a directory that can be written to, but {str(home)!r} is not"
            f" ({error.strerror}). Hint: choose another one by `--home` or PACELINE_HOME."
        ) from error


def _start_process(home: Path, log: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != MASTER_VARIABLE}
    environment[HOME_VARIABLE] = str(home)
    command = [sys.executable, "-m", "paceline.cli", "up", "--home", str(home), *arguments]
    with open_private(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # New session: a Ctrl-C in the terminal must not reach the master.
            start_new_session=True,
            env=environment,
        )


class _SignOfLife:
    """Observed activity of a process not answering yet: whether the process uses CPU time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begun_at = self._last_at = time.monotonic()
        self._next_line_at = self._begun_at + _SAY_S
        self.used_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since the waiting began."""
        return time.monotonic() - self._begun_at

    @property
    def silence_s(self) -> float:
        """Seconds without any CPU time used by the process."""
        return time.monotonic() - self._last_at

    def is_over(self) -> bool:
        """Return whether the waiting is over: no CPU use for too long, or the start timeout."""
        process = _process(self._pid)
        used_s = self.used_s if process is None else sum(process.cpu_times()[:2])
        if used_s > self.used_s:
            self.used_s, self._last_at = used_s, time.monotonic()
        return self.silence_s > _SILENCE_S or self.waited_s > _START_TIMEOUT_S

    def is_worth_a_line(self) -> bool:
        """Return whether the user should hear of the wait, once more."""
        if time.monotonic() < self._next_line_at:
            return False
        self._next_line_at = time.monotonic() + _SAY_S
        return True


def running_master(home: Path) -> MasterFile | None:
    """Return the master of this home; None unless the master answers."""
    file = read_master_file(home)
    return file if file is not None and master_answers(file) else None


def master_answers(file: MasterFile) -> bool:
    """Tell whether a master answers at the address in its file."""
    import httpx2

    from paceline._base.certificates import client_tls

    verify = client_tls(file.certificate) if file.url.startswith("https:") else False
    # A master without a certificate takes no other name from who sends no token.
    headers = {"Host": f"localhost:{file.port}"}
    try:
        response = httpx2.get(
            f"{file.url}/api/v1/health",
            headers=headers,
            timeout=5.0,
            trust_env=False,
            verify=verify,
        )
    except httpx2.TransportError:
        return False
    return response.is_success


def sign_in_link(client: "Client", file: MasterFile | None) -> str:
    """Return a link for the web UI, or the reason why no browser could open a link.

    Args:
        client: Knows the master.
        file: The address file of the master in the home.
    """
    link = client.sign_in_link()
    if file is None or client.url != file.url:
        return link
    if file.certificate is not None:
        return file.shown_url + link.removeprefix(file.url)
    if urlsplit(link).hostname in LOOPBACK_HOSTS:
        return link
    return (
        f"no browser can do so at {file.url}, as the master answers browsers beyond loopback by TLS"
        " only. Hint: use `--tls-cert`, or `--host 0.0.0.0` to sign in on this machine or through"
        " an SSH tunnel."
    )


def is_port_free(port: int) -> bool:
    """Return whether a port of this machine can be listened on."""
    with socket.socket() as probe:
        # Address reuse: connections in TIME_WAIT do not make the port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def count_running_attempts(home: Path) -> int:
    """Return the number of a home's attempts running here, with a master or without."""
    from paceline._cluster.runner.attempt_directory import AttemptDirectory

    attempts = home / "attempts"
    found = sorted(attempts.iterdir()) if attempts.is_dir() else []
    return sum(AttemptDirectory(path).runner_pid() is not None for path in found)


def count_running_trials(file: MasterFile, home: Path) -> int:
    """Return the number of trials running on all nodes; on this machine without an answer."""
    from paceline._cluster.messages.states import LIVE_ATTEMPTS
    from paceline.client._client import Client
    from paceline.client._http_session import ClientError, read_token

    try:
        if master_answers(file):
            with Client(file.url, read_token(home)) as client:
                attempts = client.status().attempts
            return sum(attempts.get(state, 0) for state in LIVE_ATTEMPTS)
    except ClientError:
        # Master without a database, or about to end: the count on this machine is the fallback.
        pass
    return count_running_attempts(home)


def shut_down(file: MasterFile, home: Path, *, keep_trials: bool, timeout_s: float) -> None:
    """Ask a master to stop and return after its end; a master without an answer is killed.

    Args:
        file: The master.
        home: Its home.
        keep_trials: Leave running trials to continue without it.
        timeout_s: Seconds that trials get for a checkpoint otherwise.
    """
    from paceline._cluster.messages.master_models import RUNNER_GRACE_S
    from paceline.client._client import Client
    from paceline.client._http_session import MasterUnreachableError, read_token

    # A master that does not answer cannot be asked; one that does gets the promised time,
    # the time of its kills, and a moment for its own end. An earlier signal would leave trials.
    patience_s = 0.0
    token = None
    try:
        token = read_token(home) if master_answers(file) else None
    except MasterUnreachableError as error:
        # Token unreadable: a signal ends the master, and its next start makes a new token.
        typer.echo(str(error), err=True)
    if token is not None:
        patience_s = _END_TIMEOUT_S
        if not keep_trials:
            patience_s += timeout_s + RUNNER_GRACE_S
        with Client(file.url, token) as client:
            client.shut_down(keep_trials=keep_trials, timeout_s=timeout_s)
    if not wait_for_end(file.pid, patience_s):
        end_process(file.pid)


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process is gone; return False if still alive after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie waiting to be reaped does not count."""
    return _process(pid) is not None


def end_process(pid: int) -> None:
    """End a master process by signals if the master does not leave by itself.

    Raises:
        CommandError: The process is no Python process, so that its number was reused.
    """
    import psutil

    process = _process(pid)
    if process is None:
        return
    try:
        command = " ".join(process.cmdline())
        if "python" not in command and "paceline" not in command:
            raise CommandError(
                f"Process {pid} must be the master, but runs {command!r}."
                " Hint: the master is gone and its number was given away; remove master.json."
            )
        for end in (process.terminate, process.kill):
            end()
            if wait_for_end(pid, _END_TIMEOUT_S):
                return
    except psutil.NoSuchProcess:
        return


def _process(pid: int) -> "psutil.Process | None":
    import psutil

    try:
        process = psutil.Process(pid)
        # A zombie has ended; its parent has not asked for its code yet.
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def _last_words(log: Path, start: int) -> str:
    """Return the master's output since `start`: its error message, if there is any."""
    with open(log, "rb", opener=regular_opener) as file:
        # A log that has grown large begins anew.
        file.seek(start if start <= log.stat().st_size else 0)
        text = file.read().decode(errors="replace").strip()
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("Error: "):
            return "\n".join(lines[index:]).removeprefix("Error: ")
    tail = " | ".join(lines[-3:]) or "it printed nothing"
    return f"The master must start, but ended: {tail}. Hint: see {str(log)!r}."
