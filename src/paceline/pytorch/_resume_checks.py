"""What was changed between a checkpoint and the training that goes on from it.

What cannot be changed is refused by name; what may be changed is applied and named.
"""

import logging
from collections.abc import Mapping
from typing import Any

from paceline.engine import CheckpointMismatchError, EpochOrder, Position, SettingChanges
from paceline.pytorch._context import PyTorchTrialContext
from paceline.pytorch._trial_state import plain_hparams

_SIZES = {"epoch_batches": "global batches", "epoch_samples": "samples"}

logger = logging.getLogger(__name__)


def changes_since(
    training: Mapping[str, Any],
    context: PyTorchTrialContext,
    position: Position,
    order: EpochOrder | None,
) -> SettingChanges:
    """Compare a checkpoint with the training that goes on from it.

    Args:
        training: The checkpoint's state that all ranks share.
        context: The context of the training that goes on.
        position: Where the checkpoint lies.
        order: The samples of the epoch that goes on; None for data without a length.

    Raises:
        CheckpointMismatchError: The seed was changed, or an epoch was begun that the present data
            do not have.
    """
    _check_seed(training["seed"], context.given_seed)
    changes = SettingChanges(training.get("built"), context.built)
    if context.core.latest_checkpoint is None:
        # One run's hyperparameters are compared when it goes on.
        _note_hparams(changes, training, context)
    if position.batch_in_epoch:
        _check_epoch(training, position, order)
    else:
        for name, size in epoch_sizes(order).items():
            stored = training.get(name, size)
            if stored != size:
                changes.note(f"the number of {_SIZES[name]} of an epoch", stored, size)
    return changes


def epoch_sizes(order: EpochOrder | None) -> dict[str, int | None]:
    """Return the numbers of global batches and of samples of an epoch, as checkpoints hold them."""
    return {
        "epoch_batches": None if order is None else order.num_batches,
        "epoch_samples": None if order is None else order.num_samples,
    }


def _check_seed(stored: int, given: int | None) -> None:
    if given not in (None, stored):
        raise CheckpointMismatchError(
            f"`seed` must be {stored}, as the checkpoint's order of samples depends on it, but got"
            f" {given}. Hint: leave it out; or begin a new training with the checkpoint's weights"
            " (`pytorch.load_weights_from_checkpoint_path`)."
        )


def _note_hparams(
    changes: SettingChanges, training: Mapping[str, Any], context: PyTorchTrialContext
) -> None:
    before, (now, unstored) = training.get("hparams"), plain_hparams(context)
    if before is None or now is None:
        return
    left_out = {*unstored, *training.get("unstored_hparams", ())}
    for name in sorted((before.keys() | now.keys()) - left_out):
        if before.get(name) != now.get(name):
            changes.note(f"hyperparameter {name}", before.get(name), now.get(name))


def _check_epoch(training: Mapping[str, Any], position: Position, order: EpochOrder | None) -> None:
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
            logger.warning(
                "The checkpoint lies within an epoch of %s %s, and the present data have %s: some"
                " samples of this epoch are trained twice or not at all.",
                stored,
                _SIZES[name],
                size,
            )
            return
