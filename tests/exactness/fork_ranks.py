"""Run a script as ranks that are forked from a process that has torch loaded.

Arguments: how many, the script, and its arguments. This takes less time than the launcher, whose
workers each load torch. As there, the others must end soon after the first rank that fails.
"""

import os
import runpy
import signal
import sys
import time

import paceline.pytorch  # noqa: F401 # so that no rank takes the time
from paceline.workers import PortReservation

GRACE_S = 60.0


def start_rank(rank: int, num_ranks: int, port: int) -> int:
    """Return the process id of a rank; in the rank itself, return 0."""
    pid = os.fork()
    if pid == 0:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
    return pid


def wait(running: set[int]) -> int:
    """Return the exit code of the first rank that fails, or 0."""
    code, deadline = 0, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            ended = os.waitstatus_to_exitcode(status)
            if ended and not code:
                code, deadline = ended, time.monotonic() + GRACE_S
        elif time.monotonic() > deadline:
            for each in running:
                os.kill(each, signal.SIGKILL)
        else:
            time.sleep(0.02)
    return code if code >= 0 else 128 - code


def main() -> None:
    """Start the ranks; each of them returns from here, too."""
    num_ranks = int(sys.argv[1])
    running = set[int]()
    with PortReservation() as reservation:
        for rank in range(num_ranks):
            pid = start_rank(rank, num_ranks, reservation.port)
            if pid == 0:
                return
            running.add(pid)
        sys.exit(wait(running))


main()
sys.argv[:] = sys.argv[2:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
