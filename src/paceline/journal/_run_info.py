"""What a run directory tells the processes of a run: its facts, and the runner's last message."""

from typing import Any

import msgspec

RUN_FORMAT_VERSION = 1


class TrialInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a trial that its processes may read."""

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]
    config: dict[str, Any]


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`, written before the processes start and never changed.

    `trial` is None for a run without a master. `attempt` is the attempt that the processes belong
    to when a runner or launcher made the directory; a run without a master counts its attempts by
    their journals. `seed` and `hparams` are those of a run without a master, if they are known.
    `judged_metrics` names the validation metrics that a search needs to judge a report; None if
    there is no search that stops trials, or a master that does not tell `Control.judged`.
    `metadata` is what earlier attempts of a trial have set. `container_slot_counts` are the slots
    of each node of `container_addrs`; those of this one on each if it is empty. With
    `storage_per_node`, each node of an attempt on several keeps checkpoints in its run directory.
    `previous` is the `run_id` of the newest run of the same name when a run without a master began.
    """

    version: int = RUN_FORMAT_VERSION
    run_id: str
    name: str
    created: float
    attempt: int = 0
    generation: int = 0
    trial: TrialInfo | None = None
    latest_checkpoint: str | None = None
    steps_completed: int = 0
    checkpoint_storage: str
    cluster_id: str = ""
    agent_id: str = ""
    slot_ids: list[int] = []
    container_addrs: list[str] = []
    container_rank: int = 0
    container_slot_counts: list[int] = []
    arguments: list[str] = []
    seed: int | None = None
    hparams: dict[str, Any] | None = None
    judged_metrics: list[str] | None = None
    metadata: dict[str, Any] | None = None
    storage_per_node: bool = False
    previous: str | None = None


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """Last message of the runner to the processes; the file is replaced as a whole.

    Attributes:
        should_preempt: Checkpoint and leave.
        operation_length: The target of the current search operation (absolute), None before the
            first one is known.
        operations_closed: No operation follows the ones completed so far.
        best_validation: The best searched metric of the whole experiment that is known.
        judged: Generation and sequence number of the chief's newest record that the search has
            judged: all of this is said in the knowledge of it. Not every record changes it.
        reports_released: The number of the chief's newest report that a stepwise run may go on
            from, None before the first one is known.
        is_stopped: A stepwise run is to end at its present report.
    """

    should_preempt: bool = False
    operation_length: int | None = None
    operations_closed: bool = False
    best_validation: float | dict[str, str] | None = None
    judged: tuple[int, int] | None = None
    reports_released: int | None = None
    is_stopped: bool = False
