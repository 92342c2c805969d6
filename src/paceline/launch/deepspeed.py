"""Launcher of a worker per slot for DeepSpeed: ``python3 -m paceline.launch.deepspeed``.

This is the launcher of `torch_distributed` with the same options. The workers also get
variables of DeepSpeed's own launcher: LOCAL_SIZE, CROSS_RANK and CROSS_SIZE. Shared memory that
killed workers leave is removed.
"""

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline._training.workers.process_pools import WorkerVariables
from paceline._training.workers.processes.rank_environment import NodeLayout
from paceline.launch._launcher_arguments import Backend, LaunchOptions, check_installed
from paceline.launch.torch_distributed import launch

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where shm_open makes its files


class DeepSpeedBackend(Backend):
    """The variables of DeepSpeed's launcher."""

    @contextmanager
    def open(self, options: LaunchOptions) -> Iterator[WorkerVariables]:
        """Yield a function for the variables of the workers.

        Raises:
            LaunchArgumentError: DeepSpeed is not installed.
        """
        check_installed("deepspeed", self.launcher, "DS_BUILD_OPS=0 pip install deepspeed")
        # Meeting places of groups of workers so far.
        met: set[tuple[str, int]] = set()

        def variables(layout: NodeLayout) -> list[dict[str, str]]:
            # The group before has ended. Its buffers would be taken for the next one's.
            met.add((layout.master_address, layout.master_port))
            _remove_buffers(met)
            return _deepspeed_variables(layout)

        try:
            yield variables
        finally:
            _remove_buffers(met)


def _remove_buffers(met: set[tuple[str, int]]) -> None:
    """Remove buffers left by ended ranks, 66 MB each: DeepSpeed on CPUs sums in shared memory.

    Args:
        met: The addresses and ports at which they met. Names of buffers have them.
    """
    for address, port in met:
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_"
        for path in _SHARED_MEMORY.glob(f"{glob.escape(name)}*"):
            path.unlink(missing_ok=True)


def _deepspeed_variables(layout: NodeLayout) -> list[dict[str, str]]:
    same = {
        "LOCAL_SIZE": str(layout.num_local_workers),
        "CROSS_RANK": str(layout.node_rank),
        "CROSS_SIZE": str(layout.num_nodes),
    }
    return [same] * layout.num_local_workers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit code, as `torch_distributed.main` does."""
    return launch(arguments, DeepSpeedBackend("deepspeed"))


if __name__ == "__main__":
    sys.exit(main())
