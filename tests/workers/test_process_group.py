"""Ranks that join torch's process group at different times."""

import os
import socket
import sys
import threading
import time

import cloudpickle
import pytest

from paceline._base.process_and_network import await_listener
from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.processes.rank_environment import join_process_group

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def join_late(late_rank: int, method: str) -> float:
    """Join the others, one rank later than they, and return the sum over all."""
    import torch
    from torch import distributed

    rank = int(os.environ["RANK"])
    if rank == late_rank:
        time.sleep(0.3)
    if method == "env://":
        join_process_group("gloo", timeout_s=60)
    else:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        join_process_group("gloo", timeout_s=60, method=address, rank=rank, world_size=3)
    numbers = torch.tensor([float(rank + 1)])
    distributed.all_reduce(numbers)
    return float(numbers)


@pytest.mark.parametrize(("late_rank", "method"), [(0, "env://"), (0, "tcp"), (2, "env://")])
def test_ranks_meet_whoever_comes_last(late_rank: int, method: str) -> None:
    with LocalPool(3, threads_per_worker=1) as pool:
        assert pool.submit(join_late, (late_rank, method)).wait() == [6.0] * 3


def test_a_listener_is_waited_for_and_its_lack_is_told() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        error = await_listener("127.0.0.1", port, 0.05)
        assert isinstance(error, ConnectionRefusedError)
        opening = threading.Timer(0.2, listener.listen)
        opening.start()
        assert await_listener("127.0.0.1", port, 60.0) is None
        opening.join()
