"""Differences between a checkpoint and the training that resumes from it.

What cannot be changed is refused by name; what may be changed is applied and named.
"""

from collections.abc import Mapping
from typing import Any

from paceline.engine import CheckpointMismatchError
from paceline.pytorch._trial_checkpoint_facts import checkpoint_hparams
from paceline.pytorch._trial_context import PyTorchTrialContext


def facts_changed_on_resume(
    training: Mapping[str, Any], context: PyTorchTrialContext
) -> list[tuple[str, Any, Any]]:
    """Return the changed hyperparameters, with their values in a checkpoint and now.

    Args:
        training: The checkpoint's state that all ranks share.
        context: The context of the training that goes on.

    Raises:
        CheckpointMismatchError: The seed was changed.
    """
    _check_seed(training["seed"], context.given_seed)
    # One run's hyperparameters are compared when it goes on.
    is_same_run = context.core.latest_checkpoint is not None
    return [] if is_same_run else _changed_hparams(training, context)


def _check_seed(stored: int, given: int | None) -> None:
    if given not in (None, stored):
        raise CheckpointMismatchError(
            f"`seed` must be {stored}, as the checkpoint's order of samples depends on it, but got"
            f" {given}. Hint: leave it out; or begin a new training with the checkpoint's weights"
            " (`pytorch.load_weights_from_checkpoint_path`)."
        )


def _changed_hparams(
    training: Mapping[str, Any], context: PyTorchTrialContext
) -> list[tuple[str, Any, Any]]:
    before, (now, unstored) = training.get("hparams"), checkpoint_hparams(context)
    if before is None or now is None:
        return []
    left_out = {*unstored, *training.get("unstored_hparams", ())}
    return [
        (f"hyperparameter {name}", before.get(name), now.get(name))
        for name in sorted((before.keys() | now.keys()) - left_out)
        if before.get(name) != now.get(name)
    ]
