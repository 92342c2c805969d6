"""Join torch's process group."""

import os

from paceline._listening import await_listener
from paceline._torch_store import with_available_store
from paceline.workers.processes._rank_environment import group_timeout

# After so long torch waits for rank 0 itself, and says what is wrong.
_LISTEN_S = 60.0


def join_process_group(
    backend: str,
    *,
    timeout_s: float,
    method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Do what `init_process_group` of torch does, without its long pauses until rank 0 is there.

    Args:
        backend: Such as "gloo".
        timeout_s: How long ranks may wait for others where nobody watches them, in seconds.
        method: "env://", or "tcp://" with the host and the port of rank 0.
        rank: The rank of this process; by default the one in the environment.
        world_size: The number of ranks; by default the one in the environment.
    """
    from torch import distributed

    own_rank = os.environ.get("RANK", "0") if rank is None else rank
    if int(own_rank) != 0:
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        if method == "env://":
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if host and port.isdecimal():
            await_listener(host, int(port), min(_LISTEN_S, timeout_s))
    with_available_store(
        lambda _: distributed.init_process_group(
            backend,
            init_method=method,
            rank=-1 if rank is None else rank,
            world_size=-1 if world_size is None else world_size,
            timeout=group_timeout(timeout_s),
        )
    )
