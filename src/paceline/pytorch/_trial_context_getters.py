"""Facts of a trial: its experiment, its hyperparameters, and the batch that is trained."""

import logging
from collections.abc import Mapping
from typing import Any

from paceline import core
from paceline.engine import Position, RegisteredModels, Stepper

logger = logging.getLogger(__name__)


class TrialFacts(RegisteredModels):
    """What a trial can ask its context.

    Args:
        core_context: The core context of this process.
        stepper: The models and optimizers.
        hparams: The hyperparameters.
        seed: The seed of the trial.
        num_shards: Into how many shards a global batch is cut, see `RegisteredModels`.
    """

    def __init__(
        self,
        core_context: core.Context,
        stepper: Stepper,
        hparams: Mapping[str, Any] | None,
        seed: int,
        num_shards: int | None,
    ) -> None:
        super().__init__(core_context, stepper, seed, num_shards)
        self._hparams = hparams
        self._has_told_rest = False

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment's config; empty without a master."""
        info = self.core.info
        return {} if info is None else dict(info.trial.config)

    def get_data_config(self) -> dict[str, Any]:
        """Return the section `data` of the experiment's config; empty if there is none."""
        return dict(self.get_experiment_config().get("data") or {})

    def get_experiment_id(self) -> int:
        """Return the experiment's number; 0 without a master."""
        return 0 if self.core.info is None else self.core.info.trial.experiment_id

    def get_trial_id(self) -> int:
        """Return the trial's number; 0 without a master."""
        return 0 if self.core.info is None else self.core.info.trial.trial_id

    def get_hparams(self) -> dict[str, Any]:
        """Return the hyperparameters.

        Raises:
            ValueError: There are none.
        """
        if self._hparams is None:
            raise ValueError(
                "There are no hyperparameters. Hint: pytorch.init(hparams={...}) sets them."
            )
        return dict(self._hparams)

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter.

        Raises:
            KeyError: There is none of this name.
        """
        hparams = self.get_hparams()
        if name not in hparams:
            raise KeyError(f"There is no hyperparameter {name!r}, only {sorted(hparams)}.")
        return hparams[name]

    @property
    def has_global_batch_size(self) -> bool:
        """Whether the hyperparameters have a `global_batch_size`; only what reads it needs it."""
        return "global_batch_size" in (self._hparams or {})

    def get_global_batch_size(self) -> int:
        """Return `hparams["global_batch_size"]`: samples per step over all shards.

        Raises:
            ValueError: It is missing, no integer, or below the number of shards.
        """
        size = (self._hparams or {}).get("global_batch_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < self.num_shards:
            hint = 'pytorch.init(hparams={"global_batch_size": 32}).'
            if self.core.info is not None:
                hint = "`hyperparameters: {global_batch_size: 32}` in the experiment's config."
            raise ValueError(
                "`hparams.global_batch_size` must be an integer of at least the number of shards"
                f" ({self.num_shards}), but got {size!r}. Hint: {hint}"
            )
        return size

    def get_per_slot_batch_size(self) -> int:
        """Return one shard's part of the global batch size, for the data loaders."""
        size = self.get_global_batch_size()
        per_slot, rest = divmod(size, self.num_shards)
        # Asked for each loader, on each rank.
        if rest and not self._has_told_rest and self.core.distributed.rank == 0:
            self._has_told_rest = True
            logger.warning(
                "`global_batch_size` %d is no multiple of %d shards: %d samples are used per step.",
                size,
                self.num_shards,
                per_slot * self.num_shards,
            )
        return per_slot

    def current_train_batch(self) -> int:
        """Return the global batch that is being trained, from 0.

        Raises:
            RuntimeError: Training has not begun.
        """
        return self._present().batches

    def current_train_epoch(self) -> int:
        """Return the epoch that is being trained, from 0.

        Raises:
            RuntimeError: Training has not begun.
        """
        return self._present().epochs

    def is_epoch_start(self) -> bool:
        """Tell whether the batch that is being trained is the first of its epoch.

        Raises:
            RuntimeError: Training has not begun.
        """
        return self._present().batch_in_epoch == 0

    def is_epoch_end(self) -> bool:
        """Tell whether the batch that is being trained is the last of its epoch.

        Raises:
            RuntimeError: Training has not begun, or the data have no length, so that nobody knows.
        """
        position = self._present()
        if self.num_epoch_batches is None:
            raise RuntimeError(
                "The end of an epoch is not known ahead for data without a length. Hint: use the"
                " callback hook `on_training_epoch_end`."
            )
        return position.batch_in_epoch + 1 == self.num_epoch_batches

    def _present(self) -> Position:
        position = None if self.loop is None else self.loop.present
        if position is None:
            raise RuntimeError("There is no current batch before training.")
        return position
