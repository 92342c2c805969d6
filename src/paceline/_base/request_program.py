"""Program of its own that answers requests over a socket."""

import json
import select
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

_TIMEOUT_S = 120.0
_CLOSE_S = 10.0


class RequestProgram:
    """Program answering requests, a line for each, from the first request until `close`.

    Args:
        name: The other side's name, for messages.
        command: Its command line. It must end when its input is closed.
        error: The exception to raise.
        directory: Its working directory, whose modules `python -m` takes before all others: by
            default one that only the administrator of the machine can write to.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        error: type[Exception] = RuntimeError,
        directory: str = "/",
    ) -> None:
        self._name = name
        self._error = error
        self._command = command
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._asking = threading.Lock()
        self._is_closed = False

    def ask(self, method: str, *, timeout_s: float = _TIMEOUT_S, **arguments: object) -> Any:
        """Return the answer to a request.

        Raises:
            Exception: Of the given class: it says that it cannot, has ended, or takes too long.
        """
        with self._asking:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            is_ready = True
            try:
                process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
                process.stdin.flush()
                is_ready = bool(select.select([process.stdout], [], [], timeout_s)[0])
                line = process.stdout.readline() if is_ready else ""
            except (OSError, ValueError):
                line = ""  # it has ended
            if not line:
                why = "has ended" if is_ready else f"did not answer within {timeout_s:g} s"
                raise self._error(f"{self._name}: its process {why}{self._end()}")
            answer = json.loads(line)
        if "error" in answer:
            raise self._error(f"{self._name}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End the program, including a request pending in another thread."""
        self._is_closed = True
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError, ValueError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        # A pending request fails with the process, and gives the lock back.
        with self._asking:
            if self._process is not None:
                self._end()

    def _started(self) -> "subprocess.Popen[str]":
        if self._is_closed:
            raise self._error(f"{self._name}: the master ends.")
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lasts as long as the process
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                # Ctrl-C is for the master, which then closes the input.
                start_new_session=True,
            )
        return self._process

    def _end(self) -> str:
        """End the program after a failure, and return its last error output."""
        process, errors = self._process, self._errors
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert errors is not None
        self._process = None
        process.kill()
        process.wait()
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        errors.close()
        return f": {lines[-1]}" if lines else "."


_LENGTH = struct.Struct("!I")
# The three standard streams and the program's further descriptors.
_MOST_DESCRIPTORS = 16


def send_message(
    end: socket.socket, content: dict[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send a message.

    Raises:
        OSError: The other side has gone.
    """
    body = json.dumps(content).encode()
    socket.send_fds(end, [_LENGTH.pack(len(body))], list(descriptors))
    end.sendall(body)


def receive_message(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message with its descriptors, and return both; None if the other side has gone.

    Raises:
        TimeoutError: The socket has a timeout, and it passed.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(
            end, _LENGTH.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not header:
            return None
        header += _receive_all(end, _LENGTH.size - len(header))
        body = _receive_all(end, _LENGTH.unpack(header)[0])
    except TimeoutError:
        raise
    except OSError:
        return None
    return json.loads(body), descriptors


def _receive_all(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("The other side has gone in the middle of a message.")
        data += piece
    return bytes(data)
