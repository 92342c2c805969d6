"""Machines for attempts, and executors of these: base class, registry, this machine."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import msgspec

from paceline._base.imports import class_named
from paceline._base.process_and_network import LOOPBACK, num_cores, unix_user
from paceline._base.run_directory import RunInfo
from paceline._cluster.master.scheduling.pools import NodeSlots
from paceline._cluster.messages.runner_messages import LOCAL_NAME, AttemptSpec, MasterAddress
from paceline._cluster.runner.attempt_directory import note_attempt
from paceline._cluster.runner.attempt_processes import AttemptProcesses, CommandWrapper


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Machine of an attempt: its name, devices, cores, interpreter and address.

    Attributes:
        name: Its name among the nodes.
        devices: One entry per slot: "cpu" or a GPU's id.
        num_cores: Its CPU cores.
        python: The interpreter of attempts that name none.
        address: Where other nodes reach it.
    """

    name: str
    devices: tuple[str, ...]
    num_cores: int
    python: str
    address: str = LOOPBACK


class Machines:
    """Machines of a cluster: the master's own alone; a subclass adds other nodes.

    Args:
        devices: One entry per slot of the master's machine: "cpu" or a GPU's id.
    """

    def __init__(self, devices: Iterable[str] = ()) -> None:
        self.devices = tuple(devices)

    def place(self, node_id: int | None) -> Place:
        """Return where the attempts of a node run; None or 0 is the master's own machine.

        Raises:
            LookupError: There is no such node.
        """
        if node_id:
            raise LookupError(f"There is no node {node_id}.")
        return Place(
            name=LOCAL_NAME, devices=self.devices, num_cores=num_cores(), python=sys.executable
        )

    def slots(self) -> list[NodeSlots]:
        """Return the slots of all present machines, the master's own first."""
        return [NodeSlots(slots=tuple(range(len(self.devices))), owner=unix_user())]

    def returning_slots(self) -> list[NodeSlots]:
        """Return the slots of absent machines seen within the last minutes."""
        return []

    def possible_slots(self) -> list[NodeSlots]:
        """Return the slots of all present and expected machines."""
        return self.slots()


class AttemptStatus(str, Enum):
    """Status of an attempt from the executor's view."""

    NOT_STARTED = "not_started"
    ALIVE = "alive"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Everything needed to start an attempt.

    The executor completes `spec` with `home` or `master`, which say where the runner finds the
    master. A runner with `master` gets the secrets by `AttemptDirectory.write_secrets`; one with
    `home` reads them there.
    """

    spec: AttemptSpec
    info: RunInfo
    secrets: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorContext:
    """Facts about the master needed by an executor.

    Attributes:
        attempts: The directory of attempts, which the executor makes and cleans.
        home: The master's home, where runners on this machine find its address and the contexts.
        master: Where the master answers, for runners elsewhere. A master that is started again can
            have another address. It has no token: `Launch.spec` has the attempt's token.
        devices: One entry per slot: "cpu" or the id of a GPU. `AttemptSpec.slot_ids` counts them.
    """

    attempts: Path
    home: Path
    master: MasterAddress
    devices: tuple[str, ...]


class Executor(ABC):
    """Starts runners and reports their state.

    The master asks for the `status` of each attempt again and again, calls `start` while that is
    NOT_STARTED, and `ship` once it is GONE before the reports of the end have arrived. Each call
    may be repeated and must return soon. Implementations must survive the master: a started
    attempt continues without it, and a new executor finds it again. Starting an attempt twice must
    run it once. All methods are called from one thread, `status` also from another one while the
    master stops. `CommandExecutor` has all of this for runners on this machine.
    """

    @classmethod
    def make(cls, context: ExecutorContext) -> "Executor":
        """Return the executor of a master; by default the class is called without arguments."""
        return cls()

    @abstractmethod
    def start(self, launch: Launch) -> None:
        """Start an attempt's runner."""

    @abstractmethod
    def status(self, attempt_id: int) -> AttemptStatus:
        """Return whether an attempt's runner is at work."""

    @abstractmethod
    def ship(self, attempt_id: int) -> None:
        """Have the unsent reports of a dead or departed runner sent to the master."""

    @abstractmethod
    def kill_runner(self, attempt_id: int) -> None:
        """Kill an unresponsive or disobedient runner; its processes end with the runner.

        An unreachable runner must end by itself once it is reachable: the master refuses its
        requests for an ended attempt (409, `attempt_over`).
        """

    def is_out_of_reach(self, attempt_id: int) -> bool:
        """Return whether nobody can kill an attempt's runner, as its machine is lost.

        A runner that gives no sign of life has then lost its attempt at once.
        """
        return False

    def sign_of_life(self, attempt_id: int) -> object:
        """Return a value changing while the runner lives, if visible here; None otherwise.

        A runner whose requests do not arrive is not taken for dead while this changes.
        """
        return None

    @abstractmethod
    def clean(self, keep: set[int]) -> None:
        """Remove the leftovers of ended attempts, except those in `keep`."""

    def close(self) -> None:
        """Release the resources of this ending process; attempts continue."""
        return


class LocalExecutor(Executor):
    """Keep attempts in ``<root>/<attempt id>/``."""

    def __init__(self, root: Path, home: Path, wrap: CommandWrapper | None = None) -> None:
        self._root = root
        self._home = home
        self._processes = AttemptProcesses(root, home, wrap)

    @classmethod
    def make(cls, context: ExecutorContext) -> "LocalExecutor":
        """Return the executor of a master."""
        return cls(context.attempts, context.home)

    def start(self, launch: Launch) -> None:
        """Start an attempt's runner."""
        attempt_id = launch.spec.attempt_id
        if not self._processes.is_prepared(attempt_id):
            note_attempt(self._root, attempt_id)
            spec = msgspec.structs.replace(launch.spec, home=str(self._home))
            self._processes.prepare(spec, launch.info)
        self._processes.start(attempt_id)

    def status(self, attempt_id: int) -> AttemptStatus:
        """Return whether an attempt's runner is at work."""
        if self._processes.is_alive(attempt_id):
            return AttemptStatus.ALIVE
        was_started = self._processes.was_started(attempt_id)
        return AttemptStatus.GONE if was_started else AttemptStatus.NOT_STARTED

    def ship(self, attempt_id: int) -> None:
        """Send the unsent reports of a dead or departed runner."""
        self._processes.ship(attempt_id)

    def sign_of_life(self, attempt_id: int) -> object:
        """Return when a runner last gave a sign of life."""
        return self._processes.sign_of_life(attempt_id)

    def kill_runner(self, attempt_id: int) -> None:
        """Kill a runner; its remaining processes are ended later, before the rest is shipped."""
        self._processes.kill_runner(attempt_id)

    def clean(self, keep: set[int]) -> None:
        """Remove the directories of ended attempts without a runner."""
        self._processes.clean(keep)

    def close(self) -> None:
        """End the template; the runners continue."""
        self._processes.close()


class CommandExecutor(LocalExecutor):
    """Base class of executors that start runners on this machine by a command of their own.

    Directories, status, kills and cleaning are those of Paceline's own executor. The command must
    run the given one as the same user and where `/proc` shows its process, for example below
    ``nice``, ``numactl`` or ``systemd-run --scope``.
    """

    def __init__(self, root: Path, home: Path) -> None:
        super().__init__(root, home, self.wrap_command)

    @abstractmethod
    def wrap_command(self, attempt_id: int, command: list[str]) -> list[str]:
        """Return the command that starts a runner.

        Args:
            attempt_id: The attempt; the runner that sends the reports of a dead one has the same.
            command: The command of the runner alone.
        """


ENTRY_POINTS = "paceline.executors"
"""The group of entry points: each names an executor and refers to its class."""

_OWN: dict[str, type[Executor]] = {"local": LocalExecutor}
# Starters of a pool's runners, not executors: named in the error for users looking here.
STARTERS = ("kubernetes", "ray", "slurm", "ssh")


def executor_named(name: str) -> type[Executor]:
    """Return the class of an executor.

    Raises:
        TypeError: The package that offers it names something else than an `Executor`.
        ValueError: Nobody offers one of this name.
    """
    if name in STARTERS:
        raise ValueError(
            f"`executor` must be local or that of a package, but got {name!r}, which starts the"
            f" runners of a pool. Hint: name it in a file of pools (`starter: {name}`) and use"
            " `paceline up --pool-file FILE`; see docs/clusters.md."
        )
    kind: type[Executor] = class_named(name, ENTRY_POINTS, _OWN, Executor, "executor")
    return kind
