"""Interface between a pool and what starts its runners."""

import secrets
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from paceline.config import Section


class StarterError(RuntimeError):
    """Raised when runners cannot be started, listed or canceled now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOrder:
    """A runner that is to be started.

    Attributes:
        name: The name of its node.
        url: Where the master answers.
        token: Its own token, for a node of this name in this pool. It must be in no command line.
        node_key: What a starter that may start the runner in another directory by the same token
            puts there into the file `node_key`, so that the master knows the node again.
        certificate: The certificate of the master (PEM) if it has one, for the file `master.pem`
            in the directory of the runner.
        command: The command line of the runner, without `--name`, `--dir` and `--token-file`.
    """

    name: str
    url: str
    token: str = field(repr=False)
    node_key: str = field(default="", repr=False)
    certificate: str | None = None
    command: tuple[str, ...] = ()

    def shell(self, name: str, directory: str, token_file: str) -> str:
        """Return the command line for a shell; the arguments are shell words already."""
        places = f" --name {name} --dir {directory} --token-file {token_file}"
        return shlex.join(self.command) + places


class Starter(ABC):
    """Start runners; one object for each pool. Methods are called from one thread.

    A runner registers as a node, asks for attempts, and leaves when it was idle for long enough.
    So a starter only starts it, says which ones there are, and cancels those that still wait.
    Implementations must survive the master: `runners` tells of what an earlier one has started.
    """

    Options: type[Section] = Section
    """The fields of `options` in the definition of a pool."""

    knows_all = True
    """Whether a runner that `runners` does not tell of has ended."""

    module: str | None = None
    """What must be installed beside Paceline, an extra of the same name as the starter."""

    def __init__(self, pool: str, cluster_id: str, directory: str, options: Section) -> None:
        self.pool = pool
        self.cluster_id = cluster_id
        self.directory = directory
        self.options = options

    def new_name(self, taken: Set[str]) -> str | None:
        """Return the name of another runner; None if there can be no more."""
        return f"{self.pool}-{secrets.token_hex(3)}"

    def new_names(self, taken: Set[str], most: int) -> Sequence[str]:
        """Return the names of other runners to be started together, as many as there can be."""
        names: list[str] = []
        while len(names) < most:
            name = self.new_name(taken | set(names))
            if name is None:
                break
            names.append(name)
        return names

    @abstractmethod
    def start(self, order: RunnerOrder) -> None:
        """Start a runner, or ask for it.

        Raises:
            StarterError: It cannot be started.
        """

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Start the runners of a trial that needs several: all or none, if the cluster can.

        Raises:
            StarterError: They cannot be started.
        """
        for order in orders:
            self.start(order)

    @abstractmethod
    def runners(self) -> dict[str, bool]:
        """Return the names of the runners that wait or run, and whether each one runs.

        Raises:
            StarterError: They cannot be told now.
        """

    def log_of(self, name: str) -> str:
        """Say where the output of a runner is, for a person who looks for it."""
        return f"{self.directory}/{name}/runner.log on its machine"

    def why_waiting(self) -> str | None:
        """Return why runners wait, as of the last `runners`; None if that is not known."""
        return None

    def cancel(self, name: str) -> None:
        """Cancel a runner that waits, and with it those of its group."""
        return

    def close(self) -> None:
        """End what only this process needs, also what another thread waits for. Runners go on."""
        return
