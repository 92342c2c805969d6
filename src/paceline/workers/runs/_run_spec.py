"""Description of a run, from the driver to its workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from paceline.storage import Kept
from paceline.workers import RankInfo as RankInfo

METRICS_GROUP = "training"
# Their times differ from run to run, so they stay apart from the metrics of training.
TIMINGS_GROUP = "profiling"
FILES_FOLDER = "files"

STATE_VERSION = 2
"""The version of what a checkpoint holds, raised by changes that earlier readers would misread.

Version 2 has sharded tensors; a checkpoint without any stays of version 1, for earlier readers.
"""
UNSHARDED_VERSION = 1


def checked_metadata(uuid: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a train function's checkpoint.

    Raises:
        ValueError: It is none, or one of a later version.
    """
    version = metadata.get("version")
    if "num_shards" not in metadata or not isinstance(version, int):
        raise ValueError(
            f"Checkpoint {uuid} must be one that a train function has saved, but has the metadata"
            f" {sorted(metadata)}."
        )
    if version > STATE_VERSION:
        raise ValueError(
            f"Checkpoint {uuid} must have version {STATE_VERSION} or an earlier one, but has"
            f" {version}. Hint: use the Paceline version that stored it or a later one."
        )
    return metadata


def checkpoint_uuid(run_id: str, attempt: int, generation: int, number: Any) -> str:
    """Return the name of a checkpoint, which every rank knows without asking the others."""
    return str(uuid5(NAMESPACE_OID, f"{run_id}/{attempt}/{generation}/{number}"))


class StoredAt(NamedTuple):
    """A checkpoint and the storage that holds it."""

    storage: str
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One generation of a run.

    Attributes:
        run_id: The run's identity.
        run_dir: The run directory.
        storage: Where checkpoints go.
        attempt: The attempt.
        generation: The generation of it.
        seed: The seed of data order and of the workers' generators.
        is_seed_given: Whether the user has asked for this seed.
        num_shards: The shards of a global batch; 0 until the first workers are there.
        first_report: The number after which reports begin.
        checkpoint: What `load_checkpoint()` returns, if it is a stored state.
        num_to_keep: How many checkpoints to keep, or None for all.
        score_attribute: The metric by which the best are kept, or None to keep the newest.
        is_score_minimized: Whether a smaller one is better.
        kept: The checkpoints that earlier generations have left.
        is_stepwise: Whether the function waits at each report until its driver lets it go on.
        storage_per_node: Whether `storage` is a directory of this node alone.
        check_ranks: Whether workers are compared, see `RankCheck`.
        restart_causes: What ended the workers of earlier starts, see `AttemptStarted`.
        judged_metrics: The metrics that a master's search needs to judge a report; None without
            such a search.
        searched_metrics: The metrics that must be numbers in what a master's search judges.
    """

    run_id: str
    run_dir: str
    storage: str
    attempt: int
    generation: int
    seed: int
    num_shards: int
    first_report: int = 0
    checkpoint: StoredAt | None = None
    num_to_keep: int | None = None
    score_attribute: str | None = None
    is_score_minimized: bool = False
    kept: tuple[Kept, ...] = ()
    is_stepwise: bool = False
    storage_per_node: bool = False
    check_ranks: bool | tuple[str, ...] = True
    is_seed_given: bool = False
    restart_causes: tuple[str, ...] = ()
    judged_metrics: tuple[str, ...] | None = None
    searched_metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of a worker in a run: the user's function and its arguments."""

    function: Any
    spec: RunSpec
    config: dict[str, Any] | None = None
    dataset: Any = None
    has_dataset: bool = False
    state: Any = None


class Instance(NamedTuple):
    """Instance that each worker makes once, for the class API."""

    kind: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self) -> Any:
        """Return the instance."""
        return self.kind(*self.args, **self.kwargs)
