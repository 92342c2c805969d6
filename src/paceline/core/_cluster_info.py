"""Facts about the cluster and the trial of a training process."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline._base.gpus import machine_gpus, names_in_variable
from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE, RunDirectory, RunInfo, TrialInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """Facts of this process's attempt: ids, slots, nodes and trial.

    Attributes:
        cluster_id: The master's identity; empty when the trial runs without one.
        agent_id: The node's name within the cluster.
        slot_ids: The slots that the attempt holds on this node.
        task_id: The trial's run, the same in all its attempts.
        allocation_id: The id of this attempt.
        task_type: "TRIAL".
        latest_checkpoint: The UUID of the checkpoint to restore, or None.
        user_data: The config's `data`.
        container_addrs: The addresses of the attempt's nodes.
        container_slot_counts: The number of slots on each of them.
        container_rank: This node's place among them.
        trial: The trial's ids, seed, hyperparameters and config.
    """

    cluster_id: str
    agent_id: str
    slot_ids: list[int]
    task_id: str
    allocation_id: str
    task_type: str
    latest_checkpoint: str | None
    user_data: Any
    container_addrs: list[str]
    container_slot_counts: list[int]
    container_rank: int
    trial: TrialInfo

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Raise AttributeError, with a hint for attributes of the trial."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in TrialInfo.__struct_fields__:
                text += f". Hint: `get_cluster_info().trial.{name}`"
            raise AttributeError(text, name=name, obj=self)

    @property
    def gpu_uuids(self) -> list[str]:
        """The UUIDs of the attempt's GPUs on this node; empty if no driver reports UUIDs.

        For a device of a GPU that is divided by MIG, it is the UUID of the device.
        """
        # A slot need not be the GPU of the same number: a master may have been given some of them.
        held = names_in_variable()
        if held is None:
            held = [str(slot) for slot in self.slot_ids]
        gpus = machine_gpus() if held else []
        found = [
            # A UUID that no list contains is believed.
            next(
                (gpu.uuid for gpu in gpus if gpu.is_called(name)), "" if name.isdecimal() else name
            )
            for name in held
        ]
        return [uuid for uuid in found if uuid]


def get_cluster_info() -> ClusterInfo | None:
    """Return the facts of this process's trial, or None without a cluster.

    Raises:
        NotARunDirectoryError: PACELINE_RUN_DIR names no run directory.
        RunVersionError: That has another format version.
    """
    path = os.environ.get(RUN_DIRECTORY_VARIABLE)
    return cluster_info_of(RunDirectory(Path(path)).read_info()) if path else None


def cluster_info_of(info: RunInfo) -> ClusterInfo | None:
    """Return the cluster facts of a run's info, or None for a run without a trial."""
    if info.trial is None:
        return None
    addresses = list(info.container_addrs) or ["127.0.0.1"]
    return ClusterInfo(
        cluster_id=info.cluster_id,
        agent_id=info.agent_id,
        slot_ids=list(info.slot_ids),
        task_id=info.run_id,
        allocation_id=f"{info.run_id}.{info.attempt}",
        task_type="TRIAL",
        latest_checkpoint=info.latest_checkpoint,
        user_data=info.trial.config.get("data") or {},
        container_addrs=addresses,
        container_slot_counts=list(info.container_slot_counts)
        or [len(info.slot_ids)] * len(addresses),
        container_rank=info.container_rank,
        trial=info.trial,
    )
