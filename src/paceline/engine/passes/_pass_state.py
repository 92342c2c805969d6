"""The state of a training in passes: what all ranks share, and what each has for itself.

In memory it is one dictionary; on the ranks it lies in parts.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.engine.passes._passes import DataPosition
from paceline.engine.state._buffers_and_gradients import restore_generators
from paceline.engine.state._changed_settings import SettingChanges
from paceline.engine.state._models_and_optimizers import ModelsAndOptimizers
from paceline.engine.state._sharded_tensor_pieces import joined_pieces, take_sharded_tensor_pieces

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""The version of a trainer's state, raised by changes that earlier readers would misread."""


class TrainsInPasses(Protocol):
    """A rank of a training in passes.

    Attributes:
        rank: The rank.
        world_size: The number of ranks.
        num_steps: The batches so far.
        seed: The seed.
        position: The position in the data.
        built: What optimizers and schedulers were built with.
    """

    rank: int
    world_size: int
    num_steps: int
    seed: int
    position: DataPosition
    built: dict[str, list[Any]]

    @property
    def is_sharded(self) -> bool:
        """Whether models are divided among the ranks."""

    def objects(self) -> ModelsAndOptimizers:
        """Return what is trained."""


def capture_pass_state(replica: TrainsInPasses) -> dict[str, Any]:
    """Return this rank's part of the state; that of the chief has what all share.

    Of sharded models, each rank has its pieces.
    """
    objects = replica.objects()
    part: dict[str, Any] = {"own": objects.own_state()}
    if replica.rank != 0 and not replica.is_sharded:
        return part
    shared = {
        "version": STATE_VERSION,
        "epoch": replica.position.num_begun,
        "num_steps": replica.num_steps,
        **objects.shared_state(),
        "built": replica.built,
        "seed": replica.seed,
        "place": replica.position.state(),
    }
    pieces: dict[str, Any] = {}
    shared = take_sharded_tensor_pieces(shared, "shared", pieces)
    part |= {"pieces": pieces} if pieces else {}
    return {"shared": shared, **part} if replica.rank == 0 else part


def join_pass_state(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a trainer's state, of the parts in rank order; its tensors are whole."""
    shared, ranks = parts[0]["shared"], [part["own"] for part in parts]
    if any("pieces" in part for part in parts):
        shared = joined_pieces(shared, [part.get("pieces", {}) for part in parts])
    if (sharded := shared.get("sharded_gradients")) is not None:
        # Those of models in one piece are the same on all ranks too.
        shared = {**shared, "sharded_gradients": None}
        ranks = [{**own, "gradients": _merged(sharded, own["gradients"])} for own in ranks]
    return {**shared, "ranks": ranks}


def _merged(first: Sequence[Any], second: Sequence[Any] | None) -> list[Any]:
    others = second or [None] * len(first)
    return [b if a is None else a for a, b in zip(first, others, strict=True)]


def split_pass_state(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a trainer's state, in rank order."""
    own, *others = whole["ranks"]
    shared = {name: value for name, value in whole.items() if name != "ranks"}
    return [{"shared": shared, "own": own}, *({"own": other} for other in others)]


def checked_pass_state(state: Any) -> dict[str, Any]:
    """Return a trainer's state.

    Raises:
        TypeError: It is no dictionary.
        ValueError: It is none of a training in passes, or one of a later version.
    """
    if not isinstance(state, dict):
        raise TypeError(f"A state must be a dictionary, but got {type(state).__name__}.")
    version = state.get("version")
    if not isinstance(version, int) or "ranks" not in state:
        raise ValueError(
            "A state must be what `PyTorchTrainer.state_dict` returned, but has the keys"
            f" {sorted(map(str, state))}."
        )
    if version > STATE_VERSION:
        raise ValueError(
            f"A state must have version {STATE_VERSION} or an earlier one, but has {version}."
            " Hint: use the Paceline version that stored it or a later one."
        )
    return state


def restore_pass_state(replica: TrainsInPasses, state: dict[str, Any]) -> None:
    """Put back a trainer's state; the generators last, as all else may draw from them.

    Raises:
        CheckpointMismatchError: It is of other models, optimizers or schedulers.
    """
    changes = SettingChanges(state.get("built"), replica.built)
    objects = replica.objects()
    objects.load_shared_state(state, changes)
    if state.get("seed", replica.seed) != replica.seed:
        changes.note("`seed`", state["seed"], replica.seed)
    replica.num_steps = state["num_steps"]
    _go_to_position(replica, state["place"], changes)
    if replica.rank == 0:
        changes.tell()
    _load_own(replica, objects, state)


def _go_to_position(
    replica: TrainsInPasses, stored: dict[str, Any], changes: SettingChanges
) -> None:
    if not replica.position.load_state(stored):
        _tell(replica, "The state was stored with other data or shards: its epoch begins anew.")
    for name, size in replica.position.sizes().items():
        before = stored.get(name, size)
        if before != size and None not in (before, size):
            changes.note(f"the number of {name.removeprefix('num_')} of an epoch", before, size)


def _load_own(replica: TrainsInPasses, objects: ModelsAndOptimizers, state: dict[str, Any]) -> None:
    """Put back what a rank alone knew; with another number of workers, all take up the chief's.

    Gradients are summed in each backward pass, so that they are the same on all ranks.
    """
    ranks = state["ranks"]
    is_same_size = len(ranks) == replica.world_size
    own = ranks[replica.rank if is_same_size else 0]
    objects.load_own_state(own)
    restore_generators(
        own["random"] if is_same_size else None,
        seed=replica.seed,
        num_steps=state["num_steps"],
        rank=replica.rank,
    )


def _tell(replica: TrainsInPasses, text: str) -> None:
    if replica.rank == 0:
        logger.warning(text)
