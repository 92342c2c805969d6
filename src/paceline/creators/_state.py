"""The state of a trainer: what all workers share, and what each has for itself."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.engine import (
    SettingChanges,
    capture_random_state,
    load_buffers,
    load_gradients,
    own_buffers,
    restore_generators,
    scheduler_state,
)

if TYPE_CHECKING:
    from paceline.creators._replica import Replica

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""The version of a trainer's state, raised by changes that earlier readers would misread."""


def rank_state(replica: "Replica") -> dict[str, Any]:
    """Return this rank's part of the state; that of the chief has what all share."""
    is_chief = replica.rank == 0
    parameters = replica.parameters()
    own: dict[str, Any] = {
        "random": capture_random_state(),
        # The chief's buffers are in the states of its models, but for those that are not stored.
        "buffers": [own_buffers(model, is_chief=is_chief) for model in replica.models],
        "gradients": None,
    }
    if any(parameter.grad is not None for parameter in parameters):
        own["gradients"] = [p.grad for p in parameters]
    if not is_chief:
        return {"own": own}
    shared = {
        "version": STATE_VERSION,
        "epoch": replica.place.num_begun,
        "num_steps": replica.num_steps,
        "models": [dict(model.state_dict()) for model in replica.models],
        "optimizers": [optimizer.state_dict() for optimizer in replica.optimizers],
        "schedulers": [scheduler_state(scheduler) for scheduler in replica.schedulers],
        "built": replica.built,
        "seed": replica.seed,
        "scaler": None if replica.scaler is None else replica.scaler.state_dict(),
        "place": replica.place.state(),
    }
    return {"shared": shared, "own": own}


def whole_state(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a trainer's state, of the parts in rank order."""
    return {**parts[0]["shared"], "ranks": [part["own"] for part in parts]}


def parts_of(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a trainer's state, in rank order."""
    own, *others = whole["ranks"]
    shared = {name: value for name, value in whole.items() if name != "ranks"}
    return [{"shared": shared, "own": own}, *({"own": other} for other in others)]


def check_state(state: Any) -> dict[str, Any]:
    """Return a trainer's state.

    Raises:
        TypeError: It is no dictionary.
        ValueError: It is none of a trainer of creators, or one of a later version.
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


def load_state(replica: "Replica", state: dict[str, Any]) -> None:
    """Put back a trainer's state; the generators last, as all else may draw from them.

    Raises:
        ValueError: It holds other numbers of models, optimizers or schedulers.
        RuntimeError: A model is another one.
    """
    kinds = ("models", "optimizers", "schedulers")
    for kind in kinds:
        num_stored, num_present = len(state[kind]), len(getattr(replica, kind))
        if num_stored != num_present:
            raise ValueError(
                f"A state must hold as many {kind} as the creators make, but holds {num_stored},"
                f" and they make {num_present}."
            )
    for model, stored in zip(replica.models, state["models"], strict=True):
        model.load_state_dict(stored)
    changes = SettingChanges(state.get("built"), replica.built)
    for index, optimizer in enumerate(replica.optimizers):
        optimizer.load_state_dict(changes.in_optimizer(state["optimizers"][index], index))
    for index, scheduler in enumerate(replica.schedulers):
        changes.load_scheduler(scheduler, state["schedulers"][index], index)
    if state.get("seed", replica.seed) != replica.seed:
        changes.note("`seed`", state["seed"], replica.seed)
    if replica.scaler is not None and state["scaler"] is not None:
        replica.scaler.load_state_dict(state["scaler"])
    elif replica.scaler is not None or state["scaler"] is not None:
        _tell(replica, "The state was stored with another precision than that of this trainer.")
    replica.num_steps = state["num_steps"]
    _go_to_place(replica, state["place"], changes)
    if replica.rank == 0:
        changes.tell()
    _load_own(replica, state)


def _go_to_place(replica: "Replica", stored: dict[str, Any], changes: SettingChanges) -> None:
    if not replica.place.load_state(stored):
        _tell(replica, "The state was stored with other data or shards: its epoch begins anew.")
    sizes = {"batches": replica.place.num_batches, "samples": replica.place.num_samples}
    for name, size in sizes.items():
        if stored.get(f"num_{name}", size) != size:
            changes.note(f"the number of {name} of an epoch", stored[f"num_{name}"], size)


def _load_own(replica: "Replica", state: dict[str, Any]) -> None:
    """Put back what a rank alone knew; with another number of workers, all take up the chief's.

    Gradients are summed in each backward pass, so that they are the same on all ranks.
    """
    ranks = state["ranks"]
    is_same_size = len(ranks) == replica.world_size
    own = ranks[replica.rank if is_same_size else 0]
    load_gradients(replica.parameters(), own["gradients"])
    for model, buffers in zip(replica.models, own["buffers"], strict=True):
        load_buffers(model, buffers)
    restore_generators(
        own["random"] if is_same_size else None,
        seed=replica.seed,
        num_steps=state["num_steps"],
        rank=replica.rank,
    )


def _tell(replica: "Replica", text: str) -> None:
    if replica.rank == 0:
        logger.warning(text)
