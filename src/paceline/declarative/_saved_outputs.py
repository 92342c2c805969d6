"""Files that a trainer writes into `model_save_dir`."""

import logging
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import pytorch
from paceline.declarative._loss_history import LossTracker
from paceline.declarative._run_files import save_weights, write_state
from paceline.declarative._training_step import Step
from paceline.display import plot_history
from paceline.engine import KeptCheckpoints, export_onnx, gathered
from paceline.storage import Kept, RetentionRules

logger = logging.getLogger(__name__)

# A run without a master keeps the newest checkpoint, and one more in case that is damaged.
_NUM_KEPT = 2
_LOSSES = ("loss", "val_loss", "test_loss")
_PARTS = ("train", "val", "test")
# What a run writes, besides its checkpoints.
_WRITTEN = ("best_model.*", "final_model.*", "checkpoint_model.*", "training_info.txt")
_DRAWN = ("lr_history.png", "loss_history.png", "acc_history_*.png")


class Outputs(Step):
    """The part of a trainer that writes weights, states, histories and pictures.

    Attributes:
        loss_tracker: The history of the losses.
        rank: This process among all; rank 0 writes.
    """

    loss_tracker: LossTracker
    rank: int
    _engine: pytorch.Trainer
    _plain_model: nn.Module
    training_dataloader: Any
    validation_dataloader: Any
    _save_dir: Path
    _is_managed: bool
    _seed: int
    _kept: KeptCheckpoints
    _is_continued: bool

    def update_saved_model(
        self,
        filename: str = "best_model.pth",
        save_configs: bool = True,
        subcomponent: str | None = None,
    ) -> None:
        """Write the model's weights into `model_save_dir`; on the chief alone.

        With `data_parallel="fsdp"` or `tensor_plan` all ranks must call it, as they gather the
        model.

        Args:
            filename: The name of the file.
            save_configs: Whether the config is written too, as configs.json.
            subcomponent: The part of the model to write; all of it by default.
        """
        is_divided = self.context.stepper.is_divided
        if self.rank != 0 and not is_divided:
            return
        part = self._plain_model
        if subcomponent is not None:
            part = part.get_submodule(subcomponent)
        state = gathered(part.state_dict()) if is_divided else part.state_dict()
        if self.rank != 0:
            return
        save_weights(state, self._save_dir / filename)
        if save_configs:
            self.configs.dump_to_json(self._save_dir / "configs.json")
        if self.configs.save_onnx and filename in ("best_model.pth", "final_model.pth"):
            # Training goes on with the random numbers that it would have without this.
            with torch.random.fork_rng():
                batch = next(iter(self.validation_dataloader))
                data, _ = self.divided(batch)
                # Of a part of the model, nobody knows what it returns.
                names = [prediction.name for prediction in self.predictions]
                export_onnx(
                    part,
                    data,
                    (self._save_dir / filename).with_suffix(".onnx"),
                    None if subcomponent is not None else names,
                )

    def save_model_and_states_checkpoint(self) -> None:
        """Store the whole state, to go on from, and the weights as checkpoint_model.pth."""
        self._engine.save_checkpoint()
        self.update_saved_model("checkpoint_model.pth")

    def write_training_info(self) -> None:
        """Write the loss tracker as training_info.txt; on the chief alone."""
        if self.rank == 0:
            self.loss_tracker.dump(self._save_dir / "training_info.txt")

    def set_earlier_files_aside(self) -> None:
        """Move what another run has written into `model_save_dir` to a directory in it.

        Its best model would else count as that of this run, which may never have one.
        """
        if self.rank != 0 or self._is_continued:
            return
        kept = self.configs.pretrained_model_path
        found = [path for pattern in (*_WRITTEN, *_DRAWN) for path in self._save_dir.glob(pattern)]
        found = [path for path in found if kept is None or path.absolute() != Path(kept).absolute()]
        if not found:
            return
        names = (f"earlier_run_{number}" for number in count(1))
        directory = next(path for name in names if not (path := self._save_dir / name).exists())
        directory.mkdir()
        for path in found:
            path.rename(directory / path.name)
        logger.info("What an earlier run has written was moved to %r.", str(directory))

    def note_checkpoint(self, uuid: str) -> None:
        """Write down that a checkpoint was stored, and delete all but the newest ones."""
        if self.rank != 0 or self._is_managed:
            return
        checkpoint = self.context.core.checkpoint
        write_state(
            self._save_dir,
            seed=self._seed,
            num_shards=self.context.num_shards,
            uuids=[*self._kept.uuids, uuid][-_NUM_KEPT:],
            storage=checkpoint.storage,
        )
        self._kept.add(Kept(uuid, self._engine.steps_completed, None))

    def _keep_newest(self, uuids: Sequence[str]) -> KeptCheckpoints:
        """Return what keeps the newest checkpoints of a run, and deletes the others.

        Args:
            uuids: Those that are there, the newest last.
        """
        return KeptCheckpoints(
            [Kept(uuid, 0, None) for uuid in uuids],
            rules=RetentionRules(latest=_NUM_KEPT),
            delete=lambda kept: self.context.core.checkpoint.delete(kept.uuid),
        )

    def run_testing(self, ind_list: Sequence[int], dataset: str = "train") -> list[Tensor]:
        """Return the predictions of some samples, by the model in inference mode.

        Args:
            ind_list: The numbers of the samples.
            dataset: "train" for those of the training data; else those of the validation data.
        """
        loader = self.training_dataloader if dataset == "train" else self.validation_dataloader
        data, _ = self.divided(loader.collate_fn([loader.dataset[index] for index in ind_list]))
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.context.stepper.autocast():
                return self._ordered(self.model(*data))
        finally:
            self.model.train(was_training)

    def plot_training_history(self) -> None:
        """Draw learning rate and losses into loss_history.png in `model_save_dir`.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if self.rank != 0:
            return
        tracker = self.loss_tracker
        rates = Path(self.configs.model_save_dir) / "lr_history.png"
        plot_history(rates, [("Learning rate", {"lr": tracker["lrs"]})], "Batch")
        rows = [
            (
                f"Loss of {term}" if term else "Loss",
                {part: tracker[f"{part}_{term}" if term else part] for part in _LOSSES},
            )
            for term in ("", *tracker.terms)
        ]
        plot_history(Path(self.configs.model_save_dir) / "loss_history.png", rows, "Epoch")

    def plot_accuracy_history(self) -> None:
        """Draw the accuracies of each prediction into acc_history_<name>.png.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if self.rank != 0:
            return
        for name in self.loss_tracker.pred_names:
            curves = {part: self.loss_tracker[f"{part}_acc_{name}"] for part in _PARTS}
            path = Path(self.configs.model_save_dir) / f"acc_history_{name}.png"
            plot_history(path, [(f"Accuracy of {name}", curves)], "Epoch")
