"""Key-value store of the ranks of an attempt, and the liveness of their processes."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from paceline._base.exceptions import text_of
from paceline._base.process_and_network import LOOPBACK, await_listener, with_available_store
from paceline.core._exceptions import (
    DistributedError,
    DistributedPeerError,
    DistributedTimeoutError,
)

_IS_LINUX = sys.platform == "linux"


class RankLiveness:
    """Liveness of the processes of ranks sharing a store.

    Args:
        store: The store, with `set`, `get` and `check`.
        rank: This process's rank.
        size: The number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._place = _own_rank_place()
        self._unknown = [other for other in range(size) if other != rank]
        self._here: dict[int, int] = {}
        store.set(f"process/{rank}", f"{os.getpid()} {self._place}")

    def leave(self) -> None:
        """Mark this rank as done with the store."""
        self._store.set(f"gone/{self._rank}", "")

    def ended(self) -> list[int]:
        """Return this machine's ranks with a process ended before calling `leave`."""
        for other in list(self._unknown):
            if self._store.check([f"process/{other}"]):
                pid, _, place = self._store.get(f"process/{other}").decode().partition(" ")
                self._unknown.remove(other)
                # Process ids are comparable only within the same boot and pid namespace.
                if place == self._place:
                    self._here[other] = int(pid)
        return [
            other
            for other, pid in self._here.items()
            if _has_ended(pid) and not self._store.check([f"gone/{other}"])
        ]


def _own_rank_place() -> str:
    """Return an identifier shared by all processes able to look each other up by process id."""
    # Containers on one machine count their processes separately.
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


_FAILED_KEY = "failed"
# Pauses grow: ranks in step meet soon, and a late rank must not cost a core.
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.01
# Each check is a request of its own, so not every look includes it.
_FAILURE_CHECK_S = 0.2
_HOST_STAYS_S = 1.0
_LEAVE_S = 10.0
_LEAVE_AFTER_FAILURE_S = 2.0
_OWN_ADDRESS_S = 30.0
# Length limit for an error's text: the store refuses values of 8 MB and drops the connection.
_LONGEST_TEXT = 2000

_num_opened: dict[tuple[str, int], int] = {}
# A server lives as long as its process: another rank may have come to the next context already
# while this one leaves the last.
_hosted: list[Any] = []
# Waits of this process: thread id to the start time and the name of the call.
_waits: dict[int, tuple[float, str]] = {}


def thread_wait(thread: int) -> tuple[float, str] | None:
    """Return the start time and call of a thread's wait for other ranks; None if not waiting."""
    return _waits.get(thread)


class KeyValueStore:
    """Connection of a rank to the key-value store shared by all ranks."""

    def __init__(self, *, host: str, port: int, rank: int, size: int, timeout_s: float) -> None:
        self._rank = rank
        self._size = size
        self.timeout_s = timeout_s
        self._is_host, self._store = _connect_to_store(host, port, rank, timeout_s)
        self._peers = RankLiveness(self._store, rank, size)

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._call(lambda: self._store.set(key, value))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys."""
        values: list[bytes] = self._call(lambda: self._store.multi_get(list(keys)))
        return values

    def add(self, key: str) -> int:
        """Increment a counter and return its new value."""
        return int(self._call(lambda: self._store.add(key, 1)))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys."""
        self._call(lambda: [self._store.delete_key(key) for key in keys])

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the missing keys."""
        return [index for index, key in enumerate(keys) if not self.has([key])]

    def wait(self, keys: Sequence[str], *, call: str, explain: Callable[[], str]) -> None:
        """Wait until all keys are there.

        Args:
            keys: The keys to wait for.
            call: The call that waits, for those who watch this thread.
            explain: Returns the text of the timeout error: which call, and who is missing.

        Raises:
            DistributedTimeoutError: The timeout passed.
            DistributedPeerError: Another rank has left by an exception, or its process has ended.
        """
        start = time.monotonic()
        next_failure_check = _FAILURE_CHECK_S
        thread = threading.get_ident()
        _waits[thread] = start, call
        try:
            while not self.has(keys):
                waited = time.monotonic() - start
                if waited >= next_failure_check:
                    self.raise_if_peer_failed()
                    self._raise_if_peer_ended(keys)
                    next_failure_check = waited + _FAILURE_CHECK_S
                if waited > self.timeout_s:
                    raise DistributedTimeoutError(explain())
                # A pause in proportion to the wait adds little to it and spares the processor.
                time.sleep(min(max(waited / 8, _FIRST_PAUSE_S), _LONGEST_PAUSE_S))
        finally:
            del _waits[thread]

    def fail(self, error: BaseException) -> None:
        """Publish this rank's exception to the other ranks; never raises."""
        try:
            # First failure wins: later failures are usually its consequences.
            if not self._store.check([_FAILED_KEY]):
                name = type(error).__name__
                # First line only: this rank prints the rest, no need to repeat it per rank.
                line = text_of(error).partition("\n")[0][:_LONGEST_TEXT]
                text = f"{name}\nrank {self._rank} failed: {name}: {line}"
                self._store.set(_FAILED_KEY, text.encode())
        except RuntimeError:
            return

    def raise_if_peer_failed(self) -> None:
        """Raise if another rank has left by an exception.

        Raises:
            DistributedPeerError: It has; the message names the rank and its error.
        """
        if self.has([_FAILED_KEY]):
            name, _, text = self.get([_FAILED_KEY])[0].decode(errors="replace").partition("\n")
            raise DistributedPeerError(
                f"All ranks must take part in every call, but {text}", error_type=name
            )

    def _raise_if_peer_ended(self, keys: Sequence[str]) -> None:
        ended = self._call(self._peers.ended)
        # Keys checked again: the process may have set them just before its end.
        if not ended or self.has(keys):
            return
        # Second check: the ended process may have published its error in between.
        self.raise_if_peer_failed()
        if self._is_host:
            # The store may end with this process before the others have looked who has ended.
            time.sleep(_HOST_STAYS_S)
        raise DistributedPeerError(
            f"All ranks must take part in every call, but the process of rank {ended[0]} has ended"
            " without a word: it was killed, or left by os._exit()."
        )

    def close(self, *, is_failure: bool = False) -> None:
        """Leave the store; the hosting rank waits a bounded time for the others to leave."""
        try:
            self._peers.leave()
            self._store.add("left", 1)
            if not self._is_host:
                return
            # The store ends with its host: the last calls of other ranks must come through first.
            deadline = time.monotonic() + (_LEAVE_AFTER_FAILURE_S if is_failure else _LEAVE_S)
            while self._num_gone() < self._size and time.monotonic() < deadline:
                if self._store.check([_FAILED_KEY]):
                    deadline = min(deadline, time.monotonic() + _LEAVE_AFTER_FAILURE_S)
                    time.sleep(_LONGEST_PAUSE_S)
                time.sleep(_LONGEST_PAUSE_S)
        except RuntimeError:
            # The host has left already.
            return

    def _num_gone(self) -> int:
        """Return how many ranks have left the store, or ended without leaving it."""
        return int(self._store.add("left", 0)) + len(self._peers.ended())

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except RuntimeError as error:
            raise DistributedPeerError(
                "The store of this attempt's ranks must be reachable, but the connection broke"
                f" ({_first_line(error)}). The process that hosts it has ended: rank 0, or its"
                " launcher."
            ) from error


def _connect_to_store(host: str, port: int, rank: int, timeout_s: float) -> tuple[bool, Any]:
    # torch takes seconds to import, and its stubs omit the stores.
    from torch import distributed

    store_class: Any = distributed.TCPStore  # type: ignore[attr-defined]
    prefix_class: Any = distributed.PrefixStore  # type: ignore[attr-defined]

    number = _num_opened.get((host, port), 0)
    _num_opened[(host, port)] = number + 1
    # Later contexts of the same processes, and torchrun's restarts, must not meet old keys.
    prefix = f"paceline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}/"

    def make_store(address: str, *, is_server: bool) -> Any:
        timeout = timedelta(seconds=timeout_s)
        return with_available_store(
            lambda use_libuv: store_class(
                address, port, None, is_server, timeout, False,
                multi_tenant=is_server, use_libuv=use_libuv,
            )
        )  # fmt: skip

    is_host = False
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        try:
            # Server bound to all addresses of this machine: any of them may be given to the ranks.
            _hosted.append(make_store(LOOPBACK, is_server=True))
            is_host = True
        except RuntimeError as error:
            if "address already in use" not in str(error).lower():
                raise DistributedError(
                    f"Rank 0 must be able to host a store at port {port}, but torch says:"
                    f" {_first_line(error)} Hint: choose a free port from 1024 to 65535 by"
                    " MASTER_PORT or `chief_port`."
                ) from error
            # Some other process of this job hosts a store there: join it like everyone else.
    if is_host:
        _await_own_store(host, port, timeout_s)
    else:
        _await_store(host, port, timeout_s)
    return is_host, prefix_class(prefix, make_store(host, is_server=False))


def _await_own_store(host: str, port: int, timeout_s: float) -> None:
    # The address may be one that leads here by way of another machine, which takes a while.
    waited_s = min(timeout_s, _OWN_ADDRESS_S)
    error = await_listener(host, port, waited_s)
    if error is not None:
        raise DistributedTimeoutError(
            f"The address of rank 0 must lead to its machine, but rank 0 hosts a store at port"
            f" {port} of {socket.gethostname()!r} and could not reach it at {host}:{port} for"
            f" {waited_s:g} s ({error.strerror or error}). Hint: check MASTER_ADDR or `chief_ip`:"
            " it must be an address of the machine on which rank 0 runs."
        ) from error


def _await_store(host: str, port: int, timeout_s: float) -> None:
    error = await_listener(host, port, timeout_s)
    if error is not None:
        raise DistributedTimeoutError(
            f"Rank 0 must host a store at {host}:{port}, but nothing answered there for"
            f" {timeout_s:g} s ({error.strerror or error}). Missing ranks: 0. Hint: check that"
            " rank 0 has started, and MASTER_ADDR, MASTER_PORT or `chief_ip`."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
