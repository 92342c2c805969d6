"""Launcher of a worker per slot for Horovod: ``python3 -m paceline.launch.horovod``.

It is the launcher of `torch_distributed` with the same options, on one node. The workers get what
`horovodrun --gloo` sets as well, and meet in Horovod's own rendezvous server, which runs here.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline._training.workers.process_pools import WorkerVariables
from paceline._training.workers.processes.rank_environment import HorovodRendezvous
from paceline.launch._launcher_arguments import (
    Backend,
    LaunchArgumentError,
    LaunchOptions,
    check_installed,
)
from paceline.launch.torch_distributed import launch


class HorovodBackend(Backend):
    """Back end with Horovod's rendezvous server, and the variables to lead workers there."""

    @contextmanager
    def open(self, options: LaunchOptions) -> Iterator[WorkerVariables]:
        """Yield a function for the variables of the workers, while the server runs.

        Raises:
            LaunchArgumentError: Horovod is not installed, or there are several nodes.
        """
        if options.num_nodes > 1:
            raise LaunchArgumentError(
                "`--nnodes` must be 1 with `paceline.launch.horovod`, but got"
                f" {options.num_nodes}. Hint: on several nodes, start the script with"
                " `horovodrun --gloo -np N -H node0:4,node1:4 python train.py`."
            )
        check_installed("horovod", self.launcher, "build it as `make test-backends` does")
        with HorovodRendezvous() as rendezvous:
            yield lambda layout: rendezvous.variables(layout.num_local_workers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit code, as `torch_distributed.main` does."""
    return launch(arguments, HorovodBackend("horovod"))


if __name__ == "__main__":
    sys.exit(main())
