"""Start one worker per slot for DeepSpeed, as ``python3 -m paceline.launch.deepspeed``.

It is the launcher of `torch_distributed` with the same options. The workers get what DeepSpeed's
own launcher sets besides: LOCAL_SIZE, CROSS_RANK and CROSS_SIZE.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.launch._arguments import LaunchOptions
from paceline.launch._backend import Backend, check_installed
from paceline.launch.torch_distributed import launch
from paceline.workers import NodeLayout, WorkerVariables


class DeepSpeedBackend(Backend):
    """The variables of DeepSpeed's launcher."""

    @contextmanager
    def open(self, options: LaunchOptions) -> Iterator[WorkerVariables]:
        """Yield what returns the variables of the workers.

        Raises:
            LaunchArgumentError: DeepSpeed is not installed.
        """
        check_installed("deepspeed", self.launcher, "DS_BUILD_OPS=0 pip install deepspeed")
        yield _variables


def _variables(layout: NodeLayout) -> list[dict[str, str]]:
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
