"""Liveness of the other ranks' processes on this machine.

A rank that was killed cannot say so, and some launchers leave the others to wait for it.
"""

import os
import socket
import sys
from typing import Any

_IS_LINUX = sys.platform == "linux"


class RankLiveness:
    """Know the processes of the ranks that share a store.

    Args:
        store: The store, with `set`, `get` and `check`.
        rank: This process's rank.
        size: The number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._place = _own_place_of_rank()
        self._unknown = [other for other in range(size) if other != rank]
        self._here: dict[int, int] = {}
        store.set(f"process/{rank}", f"{os.getpid()} {self._place}")

    def leave(self) -> None:
        """Say that this rank needs nothing more."""
        self._store.set(f"gone/{self._rank}", "")

    def ended(self) -> list[int]:
        """Return the ranks of this machine whose process ended while they were still needed."""
        for other in list(self._unknown):
            if self._store.check([f"process/{other}"]):
                pid, _, place = self._store.get(f"process/{other}").decode().partition(" ")
                self._unknown.remove(other)
                if place == self._place:
                    self._here[other] = int(pid)
        return [
            other
            for other, pid in self._here.items()
            if _has_ended(pid) and not self._store.check([f"gone/{other}"])
        ]


def _own_place_of_rank() -> str:
    """Return what is equal for processes that can look each other up by their ids."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {namespace}"
    except OSError:
        return socket.gethostname()


def _has_ended(pid: int) -> bool:
    if _IS_LINUX:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The state follows the command's name, which may hold blanks and parentheses.
                return file.read().rpartition(b") ")[2][:1] in (b"Z", b"X")
        except (FileNotFoundError, ProcessLookupError):
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
