"""The nodes of the attempt that a launcher belongs to, if a master has placed it on several."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.launch._launcher_arguments import LaunchArgumentError, LaunchOptions

if TYPE_CHECKING:
    from paceline.journal import RunInfo

_RUN_DIRECTORY_VARIABLE = "PACELINE_RUN_DIR"
_MEETING_PORT_VARIABLE = "PACELINE_MEETING_PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNodes:
    """The nodes of an attempt, and this one among them.

    Attributes:
        rank: The number of this node.
        address: The address of node 0.
        port: Where the launchers meet, on node 0.
        num_slots: The slots of the attempt on each node.
    """

    rank: int
    address: str
    port: int
    num_slots: tuple[int, ...]

    def place(self, options: LaunchOptions) -> LaunchOptions:
        """Return options with the place of this node, unless they name one themselves."""
        if options.num_nodes > 1:
            return options
        return replace(
            options,
            num_nodes=len(self.num_slots),
            node_rank=self.rank,
            master_address=self.address,
            master_port=self.port,
        )

    def sizes_for(self, options: LaunchOptions) -> tuple[int, ...]:
        """Return the number of workers of each node; empty if the options say it for all."""
        return self.num_slots if options.num_workers is None else ()


def attempt_nodes() -> AttemptNodes | None:
    """Return the nodes of the attempt of this process; None if there is one at most."""
    port = os.environ.get(_MEETING_PORT_VARIABLE)
    info = info_of_attempt() if port else None
    if port is None or info is None or len(info.container_slot_counts) < 2:
        return None
    return AttemptNodes(
        rank=info.container_rank,
        address=info.container_addrs[0],
        port=int(port),
        num_slots=tuple(info.container_slot_counts),
    )


def tell_runner(text: str) -> None:
    """Tell the runner of this node why the workers have ended, if this is an attempt of a trial."""
    if path := os.environ.get(_RUN_DIRECTORY_VARIABLE):
        from paceline.journal import NotARunDirectoryError, RunDirectory, RunVersionError

        with suppress(OSError, NotARunDirectoryError, RunVersionError):
            RunDirectory.open(Path(path)).write_launch_error(text)


def info_of_attempt() -> "RunInfo | None":
    """Return the facts of the attempt of this process, None if it is none of a master's.

    Raises:
        LaunchArgumentError: They cannot be read.
    """
    path = os.environ.get(_RUN_DIRECTORY_VARIABLE)
    if not path:
        return None
    # The journal's reader costs a good part of the launcher's start.
    from paceline.journal import NotARunDirectoryError, RunDirectory, RunVersionError

    try:
        return RunDirectory(Path(path)).read_info()
    except (NotARunDirectoryError, RunVersionError) as error:
        raise LaunchArgumentError(str(error)) from error
