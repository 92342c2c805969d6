"""Base class of starters (plug point); programs of a cluster."""

import secrets
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from paceline.config._fields_and_problems import Section


class StarterError(RuntimeError):
    """Raised when runners cannot be started, listed or canceled now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOrder:
    """Order to start a runner.

    Attributes:
        name: The name of its node.
        url: Where the master answers.
        token: Its own token, for a node of this name in this pool. It must be in no command line.
        node_key: The key of a starter that may start the runner in another directory by the same
            token puts there into the file `node_key`, so that the master knows the node again.
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
    """Base of starters of runners: an object per pool, called from a single thread.

    A runner registers as a node, asks for attempts, and leaves when it was idle for long enough.
    So a starter only starts it, says which ones there are, and cancels those that still wait.
    Implementations must survive the master: `runners` also lists the runners of an earlier master.
    """

    Options: type[Section] = Section
    """The fields of `options` in the definition of a pool."""

    knows_all = True
    """Whether a runner that `runners` does not list has ended."""

    module: str | None = None
    """The needed installation beside Paceline, an extra of the same name as the starter."""

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
        """Start a runner, or request its start.

        Raises:
            StarterError: It cannot be started.
        """

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Start the runners of a trial on several nodes: all or none, if the cluster can.

        Raises:
            StarterError: They cannot be started.
        """
        for order in orders:
            self.start(order)

    @abstractmethod
    def runners(self) -> dict[str, bool]:
        """Return the names of waiting and running runners, each with whether the runner runs.

        Raises:
            StarterError: They cannot be listed now.
        """

    def log_of(self, name: str) -> str:
        """Return the place of a runner's output, for people."""
        return f"{self.directory}/{name}/runner.log on its machine"

    def why_waiting(self) -> str | None:
        """Return the reasons for waiting as of the last `runners`; None if unknown."""
        return None

    def cancel(self, name: str) -> None:
        """Cancel a waiting runner together with its group."""
        return

    def close(self) -> None:
        """End this process's own resources and pending calls; the runners continue."""
        return


_TIMEOUT_S = 60.0


def run_program(command: Sequence[str], text: str = "", *, timeout_s: float = _TIMEOUT_S) -> str:
    """Run a program with a text as its input and return its output.

    Raises:
        StarterError: It is not installed, fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise StarterError(
            f"`{command[0]}` must be installed on the machine of the master, but is not."
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StarterError(f"`{command[0]}` failed: {type(error).__name__}.") from error
    if done.returncode != 0:
        said = " | ".join(done.stderr.strip().splitlines()[-3:]) or "it printed nothing"
        raise StarterError(f"`{command[0]}` failed with exit code {done.returncode}: {said}")
    return done.stdout
