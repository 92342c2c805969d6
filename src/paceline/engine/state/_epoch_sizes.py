"""The sizes of an epoch, as a checkpoint holds them, and those of the data that go on."""

from collections.abc import Mapping
from typing import Any

from paceline.engine.loaders._epoch_order import EpochOrder
from paceline.engine.schedule._train_units import Position
from paceline.engine.state._changed_settings import SettingChanges
from paceline.storage import CheckpointMismatchError

_SIZES = {"epoch_batches": "global batches", "epoch_samples": "samples"}


def epoch_sizes(order: EpochOrder | None) -> dict[str, int | None]:
    """Return the numbers of global batches and of samples of an epoch; None if not known."""
    return {
        "epoch_batches": None if order is None else order.num_batches,
        "epoch_samples": None if order is None else order.num_samples,
    }


def note_epoch_sizes(
    changes: SettingChanges,
    training: Mapping[str, Any],
    position: Position,
    order: EpochOrder | None,
) -> None:
    """Compare the epochs of a checkpoint with those of the present data.

    Args:
        changes: Takes what was changed.
        training: The checkpoint's state that all ranks share.
        position: Where the checkpoint lies.
        order: The samples of the epoch that goes on; None if they are not known.

    Raises:
        CheckpointMismatchError: An epoch was begun that the present data do not have.
    """
    if position.batch_in_epoch:
        _check_epoch(changes, training, position, order)
        return
    for name, size in epoch_sizes(order).items():
        stored = training.get(name, size)
        if stored != size and None not in (stored, size):
            changes.note(f"the number of {_SIZES[name]} of an epoch", stored, size)


def _check_epoch(
    changes: SettingChanges,
    training: Mapping[str, Any],
    position: Position,
    order: EpochOrder | None,
) -> None:
    """Compare the epoch that a checkpoint lies within with that of the present data."""
    sizes = epoch_sizes(order)
    num_batches = sizes["epoch_batches"]
    stored = training.get("epoch_batches", num_batches)
    if num_batches is not None and position.batch_in_epoch >= num_batches:
        raise CheckpointMismatchError(
            f"The data must have more than {position.batch_in_epoch} global batches an epoch, as"
            f" the checkpoint lies within an epoch of {stored or 'more'}, but they have"
            f" {num_batches}. Hint: go on with the data and the batch size that were trained on, or"
            " with a checkpoint of the end of an epoch."
        )
    for name, size in sizes.items():
        stored = training.get(name, size)
        if stored != size:
            changes.warn(
                f"The checkpoint lies within an epoch of {stored} {_SIZES[name]}, and the present"
                f" data have {size}: some samples of this epoch are trained twice or not at all."
            )
            return
