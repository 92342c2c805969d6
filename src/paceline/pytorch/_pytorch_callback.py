"""Hooks into training."""

from typing import Any


class PyTorchCallback:
    """Override what you need; hooks run on every rank unless they say otherwise.

    Several callbacks run in the order of `build_callbacks()`.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Run before the data loaders are built."""

    def on_training_start(self) -> None:
        """Run after the state was restored, before the first batch."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before the first batch of an epoch."""

    def on_training_workload_end(
        self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Run after training metrics were reported.

        Args:
            avg_metrics: Means over batches and ranks since the last report.
            batch_metrics: What `train_batch` returned since then on this rank; kept only if some
                callback overrides this hook.
        """

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Run after the last batch of an epoch."""

    def on_validation_start(self) -> None:
        """Run before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Run before the first batch of a validation."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Run after the last batch of a validation with this rank's metrics of each batch."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Run after a validation with the reduced metrics, the same on every rank."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a state is restored; may change it."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Run on the chief before a state is stored; may change it."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Deprecated spelling of `on_checkpoint_write_end`."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Run on the chief when the files are written, before the checkpoint is committed.

        It runs in the thread that writes; files put into the directory become part of it.
        """

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Run on the chief, between two batches, after a checkpoint was committed."""

    def on_trial_shutdown(self) -> None:
        """Run at the end, in reverse order, whatever happened."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint shall keep of this callback."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
