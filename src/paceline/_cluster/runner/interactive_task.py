"""Interactive task of an attempt: streams between its socket and its user, and its idle end."""

import http.client
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline._base.progress_display import format_duration
from paceline._base.run_directory import RunDirectory
from paceline._base.stream_relay import FarStream, StreamGoneError, relay
from paceline._cluster.messages.runner_messages import (
    AttemptSpec,
    StreamMark,
    StreamNames,
    StreamPoll,
)
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
    encode,
)

logger = logging.getLogger(__name__)

SOCKET_NAME = "task.sock"
TOKEN_VARIABLE = "JUPYTER_TOKEN"  # noqa: S105 - the name of a variable, no secret
_WAIT_S = 20.0
_SLACK_S = 10.0
_READY_POLL_S = 0.3
_LOOK_S = 10.0
# So long a stream outlives a master that does not answer; one that was started again has none.
_PATIENCE_S = 30.0
_ANSWER_S = 5.0
_MAX_ANSWER_BYTES = 2**20
# How long the task may take to end by itself.
_END_S = 10.0
# A program that does not listen by then never will.
_START_S = 600.0
_LAST_WORDS_S = 3.0


class InteractiveTask:
    """Interactive task: a program that listens on a socket in the run directory.

    Threads and connections of their own pass bytes on, so that nothing else of the attempt waits.

    Args:
        spec: The attempt.
        run: Its run directory.
        link: A connection to the master.
    """

    def __init__(self, spec: AttemptSpec, run: RunDirectory, link: MasterLink) -> None:
        self._kind, self._idle_timeout_s = spec.interactive, spec.idle_timeout_s
        self._path = f"/attempts/{spec.attempt_id}/streams"
        self._socket_path = run.path / SOCKET_NAME
        self._link = link
        self.token = secrets.token_urlsafe(24)
        self.is_ready = False
        self._is_over = threading.Event()
        self._served: dict[str, threading.Thread] = {}
        self._used_at = time.monotonic()
        self._signs: Any = None
        self.end_reason: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the program."""
        return {TOKEN_VARIABLE: self.token} if self._kind == "notebook" else {}

    def start(self, stop: Callable[[float], object]) -> None:
        """Begin to serve, and to look whether the task is used.

        Args:
            stop: Ends the program within so many seconds.
        """
        threading.Thread(target=self._serve, name="streams", daemon=True).start()
        threading.Thread(target=self._watch, args=(stop,), name="idle", daemon=True).start()

    def close(self) -> None:
        """Serve no more, once the last words of the program are with the master."""
        self._is_over.set()
        until = time.monotonic() + _LAST_WORDS_S
        for thread in self._served.copy().values():
            thread.join(max(0.0, until - time.monotonic()))

    # ---- streams -------------------------------------------------------------------------

    def _serve(self) -> None:
        version, backoff = -1, MasterBackoff()
        while not self._is_over.is_set():
            if not self.is_ready and self._listens():
                # Nobody could use it before.
                self._note_use()
                self.is_ready = True
            try:
                found = self._ask(version)
                backoff.reset()
            except RefusedByMasterError as error:
                logger.error("The master wants no streams of this task: %s", error)
                return
            except Exception as error:
                logger.debug("The master names no streams now: %s", error)
                # One that was started again counts anew.
                version = -1
                self._is_over.wait(backoff.next_s())
                continue
            version = found.version
            self._served = {name: one for name, one in self._served.items() if name in found.names}
            for name in found.names if self.is_ready else ():
                if name not in self._served:
                    thread = threading.Thread(
                        target=self._pass_on, args=(name,), name="stream", daemon=True
                    )
                    self._served[name] = thread
                    thread.start()
            if not self.is_ready:
                self._is_over.wait(_READY_POLL_S)

    def _ask(self, version: int) -> StreamNames:
        link = f"/lab?token={self.token}" if self._kind == "notebook" else "/"
        wait_s = _WAIT_S if self.is_ready else 0.0
        after = version if self.is_ready else -1
        poll = StreamPoll(link=link, is_ready=self.is_ready, after=after, wait_s=wait_s)
        reply = self._link.post(self._path, encode(poll), timeout_s=wait_s + _SLACK_S)
        return msgspec.json.decode(reply, type=StreamNames)

    def _listens(self) -> bool:
        try:
            _connect(self._socket_path).close()
        except OSError:
            return False
        return True

    def _pass_on(self, name: str) -> None:
        far = _LinkedStream(self._link, f"{self._path}/{name}")
        try:
            near = _connect(self._socket_path)
        except OSError as error:
            logger.warning("The task takes no connection: %s", error)
            far.close()
            return
        near.settimeout(None)
        # Pages that are open ask a notebook for news all the time: only its kernels count.
        relay(near, far, self._note_use if self._kind != "notebook" else lambda: None)

    def _note_use(self) -> None:
        self._used_at = time.monotonic()

    # ---- idle ----------------------------------------------------------------------------

    def _watch(self, stop: Callable[[float], object]) -> None:
        pause_s = min(_LOOK_S, self._idle_timeout_s / 5)
        while not self._is_over.wait(pause_s):
            is_busy, signs = self._look()
            if is_busy or signs != self._signs:
                self._signs = signs
                self._note_use()
            limit_s, what = self._idle_timeout_s, "idle for"
            if not self.is_ready:
                limit_s, what = max(limit_s, _START_S), "it did not listen within"
            if time.monotonic() - self._used_at > limit_s:
                self.end_reason = f"{what} {format_duration(limit_s)}"
                logger.info("The task ends: %s.", self.end_reason)
                stop(_END_S)
                return

    def _look(self) -> tuple[bool, Any]:
        """Return whether the program is at work, and signs that change with each use."""
        if self._kind == "shell":
            # Its program touches the socket.
            with suppress(OSError):
                return False, os.stat(self._socket_path).st_mtime_ns
        if self._kind != "notebook":
            return False, self._signs
        try:
            kernels = self._read_jupyter("/api/kernels")
            terminals = self._read_jupyter("/api/terminals")
            is_busy = any(one["execution_state"] == "busy" for one in kernels)
            return is_busy, [(one.get("id"), one["last_activity"]) for one in kernels + terminals]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            logger.debug("Jupyter does not tell of its kernels: %s", error)
            return False, self._signs

    def _read_jupyter(self, path: str) -> list[Any]:
        connection = http.client.HTTPConnection("localhost", timeout=_ANSWER_S)
        connection.sock = _connect(self._socket_path)
        try:
            connection.request("GET", path, headers={"Authorization": f"token {self.token}"})
            response = connection.getresponse()
            if response.status == http.client.NOT_FOUND:
                return []  # no terminals there
            found = json.loads(response.read(_MAX_ANSWER_BYTES))
            return found if isinstance(found, list) else []
        finally:
            connection.close()


class _LinkedStream(FarStream):
    """Stream by the master, with a connection for each direction."""

    def __init__(self, link: MasterLink, path: str) -> None:
        self._path = path
        self._reader, self._writer = link.another(), link.another()

    def read(self, offset: int) -> bytes | None:
        """Return bytes from an offset on; see the base class."""
        query = f"{self._path}?offset={offset}&wait_s={_WAIT_S}"
        try:
            return _repeated(lambda: self._reader.get(query, timeout_s=_WAIT_S + _SLACK_S))
        except RefusedByMasterError as error:
            if error.status == http.client.GONE:
                return None
            raise StreamGoneError(str(error)) from error

    def write(self, offset: int, data: bytes, *, is_end: bool) -> int:
        """Send bytes; see the base class."""
        query = f"{self._path}?offset={offset}&wait_s={_WAIT_S}"
        query += "&is_end=true" if is_end else ""
        try:
            reply = _repeated(lambda: self._writer.put(query, data, {}))
        except RefusedByMasterError as error:
            raise StreamGoneError(str(error)) from error
        return msgspec.json.decode(reply, type=StreamMark).num_bytes

    def close(self) -> None:
        """Close the stream for the other side, too."""
        link = self._writer.another()
        with suppress(UnreachableError, RefusedByMasterError):
            link.delete(self._path)
        link.close()


def _repeated(ask: Callable[[], bytes]) -> bytes:
    backoff, until = MasterBackoff(), time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ask()
        except UnreachableError as error:
            if time.monotonic() > until:
                raise StreamGoneError(str(error)) from error
            time.sleep(backoff.next_s())


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
