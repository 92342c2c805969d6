"""Small exchanges between the ranks of an attempt, with call names to detect mismatches."""

import os
import pickle
import socket
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from paceline._base.exceptions import CollectiveMismatchError
from paceline._base.process_and_network import LOOPBACK, PortReservation
from paceline.core._key_value_store import KeyValueStore
from paceline.core._launcher_place import LaunchedPlace, launched_place

_PACKAGE = __name__.partition(".")[0]
# The same exchange serves many callers there: whoever calls them tells which one it is.
_SHARED = frozenset({"failing_together", "decide", "barrier", "_exchange", "submit", "ask"})
_STANDARD = frozenset({"contextlib", "functools"})
_SEPARATOR = "\t"


class CallName(NamedTuple):
    """Name of an exchange.

    Attributes:
        operation: The operation, such as "allgather".
        caller: The function of Paceline that exchanges; empty if the user's code does.
        told: The name in messages: the function that the user's code calls, and where.
    """

    operation: str
    caller: str
    told: str

    def encode(self) -> bytes:
        """Return the name as the head of a message."""
        return _SEPARATOR.join(self).encode() + b"\n"

    def is_same(self, other: "CallName") -> bool:
        """Return whether both names mean the same exchange, wherever a script makes the call."""
        return (self.operation, self.caller) == (other.operation, other.caller)


def call_name(operation: str) -> CallName:
    """Return the name of an exchange begun by the caller of the calling module."""
    # Frames instead of `inspect.stack`, which reads source files: this runs at each exchange.
    module = sys._getframe(1).f_globals["__name__"]
    frame: FrameType | None = sys._getframe(1)
    caller, function = "", f"distributed.{operation}"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] == _PACKAGE:
            if name != module:
                function = frame.f_code.co_name
                if not caller and function not in _SHARED:
                    caller = f"{name}.{function}"
        elif name not in _STANDARD:
            break
        frame = frame.f_back
    return CallName(operation, caller, f"`{function}`{_place_of(frame)}")


def split_message(message: bytes) -> tuple[CallName, bytes]:
    """Return the name and the value of a message."""
    head, _, value = message.partition(b"\n")
    operation, caller, told = head.decode().split(_SEPARATOR)
    return CallName(operation, caller, told), value


def check_same_call(own: CallName, rank: int, others: Mapping[int, CallName]) -> None:
    """Require the same exchange of all other ranks.

    Raises:
        CollectiveMismatchError: One makes another one.
    """
    different = {other: name for other, name in others.items() if not own.is_same(name)}
    if not different:
        return
    told = "; ".join(f"rank {other} called {name.told}" for other, name in different.items())
    raise CollectiveMismatchError(
        f"All ranks must make the same calls in the same order, but rank {rank} called {own.told},"
        f" and {told}. Hint: call it on all ranks, not below `if rank == 0:`."
    )


def _place_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    code = frame.f_code
    # A line break or a tab in a name would end the head of a message.
    file = " ".join(os.path.basename(code.co_filename).split())
    return f" ({file}:{frame.f_lineno} in {code.co_name})"


def check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:
        raise ValueError(f"`timeout_s` must be above 0, but got {timeout_s}.")


def check_place(name: str, value: int, bound_name: str, bound: int) -> None:
    if bound < 1 or not 0 <= value < bound:
        raise ValueError(
            f"`{name}` must be from 0 to `{bound_name}` - 1, but got {name}={value} and"
            f" {bound_name}={bound}."
        )


def check_address(chief_ip: str | None, chief_port: int | None, num_nodes: int) -> tuple[str, int]:
    if chief_ip is None:
        if num_nodes > 1:
            raise ValueError(
                f"`chief_ip` must be given with several nodes, but got None for {num_nodes} nodes."
                " Hint: pass the address of rank 0's node, or set MASTER_ADDR."
            )
        chief_ip = LOOPBACK
    if chief_port is None:
        raise ValueError(
            "`chief_port` must be given with several ranks, but got None. Hint: pass one free"
            " port, the same on all ranks."
        )
    return chief_ip, chief_port


T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0


class DistributedContext:
    """Knows the place of a process among the ranks, and exchanges small values between them.

    All ranks (of a node, for the `_local` calls) make the same calls in the same order. Each
    message has the name of its call: if ranks make different calls, `CollectiveMismatchError` names
    these and the ranks. Values are pickled: they travel between an attempt's own processes only.

    Args:
        rank: This process among all, from 0.
        size: The number of processes.
        local_rank: This process among the processes of its node, from 0.
        local_size: The number of processes on this node.
        cross_rank: This node among all, from 0.
        cross_size: The number of nodes.
        chief_ip: The address of rank 0; needed with more than one node.
        chief_port: The port at which rank 0 hosts the store; needed with more than one rank.
        timeout_s: How long to wait for missing ranks, in seconds.

    Raises:
        ValueError: A number is out of range, or an address is missing.
        DistributedTimeoutError: Rank 0 cannot be reached in time.
        DistributedError: Rank 0 cannot listen at its port.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        cross_rank: int,
        cross_size: int,
        chief_ip: str | None = None,
        chief_port: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        check_place("rank", rank, "size", size)
        check_place("local_rank", local_rank, "local_size", local_size)
        check_place("cross_rank", cross_rank, "cross_size", cross_size)
        check_timeout(timeout_s)
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size
        self._timeout_s = timeout_s
        self._is_closed = False
        self._num_calls: dict[str, int] = {}
        self._transport: KeyValueStore | None = None
        if size > 1:
            host, port = check_address(chief_ip, chief_port, cross_size)
            self._transport = KeyValueStore(
                host=host, port=port, rank=rank, size=size, timeout_s=timeout_s
            )

    @classmethod
    def from_torch_distributed(
        cls, chief_ip: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "DistributedContext":
        """Return the context described by the environment variables of this process's launcher.

        The launcher is torchrun, Paceline's own, srun, mpirun (Open MPI, MPICH, MVAPICH), mpiexec
        of PALS or jsrun. Without one, or with one process, the context has one rank and loads no
        torch. It works before and after `torch.distributed.init_process_group`, which it does not
        need.

        Args:
            chief_ip: The address of rank 0; by default MASTER_ADDR, else the launcher's value.
            timeout_s: How long to wait for missing ranks, in seconds.

        Raises:
            ValueError: A variable is missing or no number.
            DistributedTimeoutError: Rank 0 cannot be reached in time.
            DistributedError: Rank 0 cannot listen at its port.
        """
        place = launched_place()
        return cls.single() if place is None else cls._of_place(place, chief_ip, timeout_s)

    @classmethod
    def from_horovod(
        cls, hvd: Any, chief_ip: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "DistributedContext":
        """Make the context from Horovod, after `hvd.init()`.

        Horovod knows the ranks' places, and sends the address of rank 0 to the others. Exchanges
        then use a store of rank 0, as with other launchers.

        Args:
            hvd: Horovod's module, such as `horovod.torch`.
            chief_ip: The address of rank 0; by default the loopback address on one node, else the
                name of rank 0's host.
            timeout_s: How long to wait for missing ranks, in seconds.

        Raises:
            RuntimeError: Horovod is not initialized.
            DistributedTimeoutError: Rank 0 cannot be reached in time.
            DistributedError: Rank 0 cannot listen at its port.
        """
        if not hvd.is_initialized():
            raise RuntimeError(
                "Horovod must be initialized before `from_horovod`, but is not. Hint: hvd.init()."
            )
        if hvd.size() == 1:
            return cls.single()
        own_address = LOOPBACK if hvd.cross_size() == 1 else socket.gethostname()
        with PortReservation() as reservation:
            address, port = hvd.broadcast_object((chief_ip or own_address, reservation.port))
            return cls(
                rank=hvd.rank(),
                size=hvd.size(),
                local_rank=hvd.local_rank(),
                local_size=hvd.local_size(),
                cross_rank=hvd.cross_rank(),
                cross_size=hvd.cross_size(),
                chief_ip=address,
                chief_port=port,
                timeout_s=timeout_s,
            )

    @classmethod
    def from_deepspeed(
        cls, chief_ip: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "DistributedContext":
        """Return the context described by the variables of DeepSpeed's or another launcher.

        It works before and after `deepspeed.init_distributed`. DeepSpeed's launcher sets the same
        variables as torchrun, so this is `from_torch_distributed` under the name that users of
        DeepSpeed look for.

        Args:
            chief_ip: The address of rank 0; by default MASTER_ADDR.
            timeout_s: How long to wait for missing ranks, in seconds.

        Raises:
            ValueError: A variable is missing or no number.
            DistributedTimeoutError: Rank 0 cannot be reached in time.
            DistributedError: Rank 0 cannot listen at its port.
        """
        return cls.from_torch_distributed(chief_ip, timeout_s=timeout_s)

    @classmethod
    def single(cls) -> "DistributedContext":
        """Return the context of a process working alone."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)

    @classmethod
    def _of_place(
        cls, place: LaunchedPlace, chief_ip: str | None, timeout_s: float
    ) -> "DistributedContext":
        address, port = place.meeting_point(chief_ip)
        context = cls(
            rank=place.rank,
            size=place.size,
            local_rank=place.known_local_rank(),
            local_size=place.local_size or place.size,
            cross_rank=place.node_rank or 0,
            cross_size=place.num_nodes or place.size,
            chief_ip=address,
            chief_port=port,
            timeout_s=timeout_s,
        )
        if None in (place.local_size, place.node_rank, place.num_nodes):
            # The launcher did not say which ranks share a node: they find out together.
            context._agree_on_nodes(place.node_rank)
        return context

    def _agree_on_nodes(self, node_rank: int | None) -> None:
        """Derive the node's ranks from an exchange, where the launcher sets only a part.

        Args:
            node_rank: The number of this process's node, as far as the launcher reports it.
        """
        node = socket.gethostname() if node_rank is None else node_rank
        everyone = self.allgather((node, self.local_rank))
        nodes = list(dict.fromkeys(each for each, _ in everyone))
        here = [rank for rank, (each, _) in enumerate(everyone) if each == node]
        # Some scripts say 0 in each process, as each sees one GPU only.
        if len({everyone[rank] for rank in here}) < len(here) or self.local_rank >= len(here):
            self.local_rank = here.index(self.rank)
        self.local_size = len(here)
        self.cross_rank, self.cross_size = nodes.index(node), len(nodes)

    @property
    def timeout_s(self) -> float:
        """The seconds to wait for missing ranks in a call; changeable at any time."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        check_timeout(value)
        self._timeout_s = value
        if self._transport is not None:
            self._transport.timeout_s = value

    def get_rank(self) -> int:
        """Return this process's number among all."""
        return self.rank

    def get_size(self) -> int:
        """Return the number of processes."""
        return self.size

    def get_local_rank(self) -> int:
        """Return this process's number on its node."""
        return self.local_rank

    def get_num_agents(self) -> int:
        """Return the number of nodes."""
        return self.cross_size

    def gather(self, value: T) -> list[T] | None:
        """Collect every rank's value on the chief, in rank order; None elsewhere.

        No rank returns before all have called.

        Raises:
            DistributedTimeoutError: Ranks are missing; the message names them.
            DistributedPeerError: A rank has failed.
        """
        return self._gather("gather", "", self.rank, self.size, value)

    def allgather(self, value: T) -> list[T]:
        """Collect every rank's value on every rank, in rank order.

        Raises:
            DistributedTimeoutError: Ranks are missing; the message names them.
            DistributedPeerError: A rank has failed.
        """
        return self._allgather("allgather", "", self.rank, self.size, value)

    def broadcast(self, value: T) -> T:
        """Return the chief's value on every rank; the values of other ranks are ignored.

        Raises:
            DistributedTimeoutError: The chief is missing.
            DistributedPeerError: A rank has failed.
        """
        return self._broadcast("broadcast", "", self.rank, self.size, value)

    def gather_local(self, value: T) -> list[T] | None:
        """Collect values like `gather`, but among the ranks of this node only."""
        return self._gather(
            "gather_local", self._node_prefix, self.local_rank, self.local_size, value
        )

    def allgather_local(self, value: T) -> list[T]:
        """Collect values like `allgather`, but among the ranks of this node only."""
        return self._allgather(
            "allgather_local", self._node_prefix, self.local_rank, self.local_size, value
        )

    def broadcast_local(self, value: T) -> T:
        """Return the value of the node's first rank, like `broadcast` within this node."""
        return self._broadcast(
            "broadcast_local", self._node_prefix, self.local_rank, self.local_size, value
        )

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for another rank without waiting for its reader; safe in any thread."""
        self._open_transport().set(f"kept/{key}", value)

    def is_kept(self, key: str) -> bool:
        """Return whether a value that was left by `put` has not been taken yet."""
        return self._open_transport().has([f"kept/{key}"])

    def take(self, key: str) -> bytes | None:
        """Remove and return a value left by another rank; None if there is none."""
        transport, key = self._open_transport(), f"kept/{key}"
        if not transport.has([key]):
            return None
        [value] = transport.get([key])
        transport.delete([key])
        return value

    def fail(self, error: BaseException) -> None:
        """Report this rank's exception to the other ranks, so none of them waits in vain."""
        if self._transport is not None and not self._is_closed:
            self._transport.fail(error)
            self._close(is_failure=True)

    def close(self) -> None:
        """Leave the group; the rank hosting the store waits up to 10 s for the others."""
        self._close(is_failure=False)

    def __enter__(self) -> "DistributedContext":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _close(self, *, is_failure: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._transport is not None:
            self._transport.close(is_failure=is_failure)

    @property
    def _node_prefix(self) -> str:
        # On one node, all calls are counted together, so that different ones meet and are named.
        return "" if self.cross_size == 1 else f"node{self.cross_rank}/"

    def _gather(self, call: str, prefix: str, rank: int, size: int, value: T) -> list[T] | None:
        if size == 1:
            return [value]
        base, name = self._next_base(prefix), call_name(call)
        gathered = self._collect(name, base, rank, size, value)
        # The answer makes it a barrier, and so that nobody runs ahead of a missing rank.
        self._spread(name, base, rank, size, b"")
        return None if gathered is None else [_loads(item) for item in gathered]

    def _allgather(self, call: str, prefix: str, rank: int, size: int, value: T) -> list[T]:
        if size == 1:
            return [value]
        base, name = self._next_base(prefix), call_name(call)
        gathered = self._collect(name, base, rank, size, value)
        answer = b"" if gathered is None else pickle.dumps(gathered)
        return [_loads(item) for item in _loads(self._spread(name, base, rank, size, answer))]

    def _broadcast(self, call: str, prefix: str, rank: int, size: int, value: T) -> T:
        if size == 1:
            return value
        base, name = self._next_base(prefix), call_name(call)
        if rank == 0:
            self._spread(name, base, rank, size, pickle.dumps(value))
            return value
        # The chief may be in a call for which it waits for this rank.
        self._open_transport().set(f"{base}/{rank}", name.encode())
        answer: T = _loads(self._spread(name, base, rank, size, b""))
        return answer

    def _next_base(self, prefix: str) -> str:
        number = self._num_calls.get(prefix, 0)
        self._num_calls[prefix] = number + 1
        return f"{prefix}{number}"

    def _collect(
        self, name: CallName, base: str, rank: int, size: int, value: object
    ) -> list[bytes] | None:
        transport = self._open_transport()
        keys = [f"{base}/{other}" for other in range(size)]
        transport.set(keys[rank], name.encode() + pickle.dumps(value))
        if rank != 0:
            return None
        transport.wait(
            keys,
            call=f"distributed.{name.operation}",
            explain=lambda: self._explain(name, transport.missing(keys)),
        )
        gathered = [split_message(message) for message in transport.get(keys)]
        self._check_same(name, {other: told for other, (told, _) in enumerate(gathered)})
        transport.delete(keys)
        return [data for _, data in gathered]

    def _spread(self, name: CallName, base: str, rank: int, size: int, answer: bytes) -> bytes:
        transport = self._open_transport()
        key, count_key = f"{base}/all", f"{base}/read"
        if rank == 0:
            transport.set(key, name.encode() + answer)
            return answer
        # The chief is missing, unless it waits for others itself: then those are.
        keys = [f"{base}/{other}" for other in range(size)]
        transport.wait(
            [key],
            call=f"distributed.{name.operation}",
            explain=lambda: self._explain(name, self._blocking(transport, name, keys)),
        )
        told, answer = split_message(transport.get([key])[0])
        self._check_same(name, {0: told})
        if transport.add(count_key) == size - 1:
            is_broadcast = name.operation.startswith("broadcast")
            # Last reader deletes the keys: the chief returned long ago, without waiting.
            transport.delete([key, count_key, *(keys[1:] if is_broadcast else ())])
        return answer

    def _check_same(self, name: CallName, others: Mapping[int, CallName]) -> None:
        """Raise CollectiveMismatchError if others make another call; notify waiting ranks."""
        is_local = name.operation.endswith("_local")
        try:
            check_same_call(name, self.local_rank if is_local else self.rank, others)
        except CollectiveMismatchError as error:
            # The other ranks would wait for this one until their timeout.
            self._open_transport().fail(error)
            raise

    def _blocking(self, transport: KeyValueStore, name: CallName, keys: list[str]) -> list[int]:
        is_broadcast = name.operation.startswith("broadcast")
        missing = [] if is_broadcast else transport.missing(keys)
        return missing if 0 < len(missing) < len(keys) else [0]

    def _explain(self, name: CallName, missing: list[int]) -> str:
        noun = "Missing local ranks" if name.operation.endswith("_local") else "Missing ranks"
        return (
            f"All ranks must call `distributed.{name.operation}` within {self.timeout_s:g} s, but"
            f" rank {self.rank} waited in vain in {name.told}. {noun}:"
            f" {', '.join(map(str, missing))}. Hint: see the output of those ranks; all ranks must"
            " make the same calls in the same order."
        )

    def _open_transport(self) -> KeyValueStore:
        if self._is_closed:
            raise RuntimeError("A closed `DistributedContext` must not be used any more.")
        assert self._transport is not None
        return self._transport


def _loads(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - written by this attempt's own processes
