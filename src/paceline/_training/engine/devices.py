"""Device, process group and backend of a rank."""

import logging
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from paceline._base.process_and_network import LOOPBACK, PortReservation
from paceline._training.workers.joined_pool import prepare_joined, skip_interpreter_shutdown
from paceline._training.workers.processes.rank_environment import join_process_group
from paceline.core._distributed_context import DistributedContext
from paceline.core._launcher_place import launched_place

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0


def join_ranks(
    distributed: DistributedContext | None, device: torch.device | None = None
) -> DistributedContext | None:
    """Return this process's place, after making the process group if there is none.

    The place is the one given, else that of a process group which is there already, else what the
    launcher says; None for a process that works alone.

    Args:
        distributed: The place, if it is known.
        device: The device, if it is not to be a GPU wherever there is one.

    Raises:
        ValueError: A variable of the environment is missing or no number.
        DistributedTimeoutError: Ranks are missing.
    """
    place = launched_place()
    is_known = place is not None and (place.local_rank is not None or not dist.is_initialized())
    if distributed is None and is_known:
        distributed = DistributedContext.from_torch_distributed()
    if dist.is_initialized():
        distributed = distributed or _place_in_group()
    elif distributed is not None and distributed.size > 1:
        _make_group(distributed, device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        skip_interpreter_shutdown()
    return distributed


def own_device(
    local_rank: int, *, gpus_per_rank: float | None = None, chosen: torch.device | None = None
) -> torch.device:
    """Return the device of a rank: the first of its GPUs, or the CPU.

    Args:
        local_rank: The rank's number on its node.
        gpus_per_rank: How many GPUs each rank has, 0 for none; None for one each, if there are any.
        chosen: The user's own choice, such as "cuda" for a GPU of its own.
    """
    if chosen is not None and (chosen.type != "cuda" or chosen.index is not None):
        return chosen
    num_gpus = torch.cuda.device_count() if gpus_per_rank != 0 else 0
    if not num_gpus:
        return chosen or torch.device("cpu")
    return torch.device("cuda", int(local_rank * (gpus_per_rank or 1)) % num_gpus)


def use_own_device(local_rank: int, **options: Any) -> torch.device:
    """Return the device of a rank, see `own_device`, and make a GPU the current CUDA device."""
    device = own_device(local_rank, **options)
    if device.type == "cuda":
        # Current device: a plain "cuda" would mean GPU 0 in every process.
        torch.cuda.set_device(device)
    return device


def suitable_backend(device: torch.device, *, shares_gpu: bool) -> str:
    """Return the process group backend for a device; NCCL refuses ranks sharing a GPU."""
    return "nccl" if device.type == "cuda" and not shares_gpu else "gloo"


def _make_group(distributed: DistributedContext, device: torch.device | None) -> None:
    backend = _agreed_backend(distributed, device)
    logger.info("The process group of %d ranks uses %s.", distributed.size, backend)
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        join_process_group(backend, timeout_s=_TIMEOUT_S)
        return
    place = launched_place()
    if place is not None and (place.rank, place.size) == (distributed.rank, distributed.size):
        prepare_joined(distributed)
        address, port = place.meeting_point()
        _meet_other_ranks(backend, distributed, address, port)
        return
    with PortReservation() as reservation:
        address = LOOPBACK if distributed.cross_size == 1 else socket.gethostname()
        address, port = distributed.broadcast((address, reservation.port))
        _meet_other_ranks(backend, distributed, address, port)


def _meet_other_ranks(
    backend: str, distributed: DistributedContext, address: str, port: int
) -> None:
    join_process_group(
        backend,
        timeout_s=_TIMEOUT_S,
        method=f"tcp://{address}:{port}",
        rank=distributed.rank,
        world_size=distributed.size,
    )


def _agreed_backend(distributed: DistributedContext, chosen: torch.device | None) -> str:
    """Return the backend for all ranks: NCCL if each has a GPU of its own, else gloo."""
    gpu = None
    if torch.cuda.is_available() and (chosen is None or chosen.type == "cuda"):
        device = distributed.local_rank % torch.cuda.device_count()
        if chosen is not None and chosen.index is not None:
            device = chosen.index
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus = distributed.allgather(gpu)
    if None not in gpus and len(set(gpus)) == len(gpus):
        return "nccl"
    if any(gpus) and distributed.rank == 0:
        logger.warning(
            "NCCL needs a GPU for each of the %d ranks, but there are %d: gloo is used, which is"
            " slower.",
            len(gpus),
            len(set(gpus) - {None}),
        )
    return "gloo"


def _place_in_group() -> DistributedContext:
    """Return this process's place in a process group made by the user."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return DistributedContext.single()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = list(dict.fromkeys(hosts))
    with PortReservation() as reservation:
        address = LOOPBACK if len(nodes) == 1 else nodes[0]
        meeting_point = [(address, reservation.port)]
        # Rank 0's choice for all: the port is reserved on its machine.
        dist.broadcast_object_list(meeting_point)
        return DistributedContext(
            rank=rank,
            size=size,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            cross_rank=nodes.index(hosts[rank]),
            cross_size=len(nodes),
            chief_ip=meeting_point[0][0],
            chief_port=meeting_point[0][1],
        )
