"""Output files of a trainer in `model_save_dir`."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline import pytorch
from paceline._base.files import replacing_atomically
from paceline._base.imports import required_library
from paceline._training.engine.checkpoints.checkpoint_saver import KeptCheckpoints
from paceline._training.engine.checkpoints.sharded_tensor_pieces import gathered
from paceline._training.engine.checkpoints.weight_exports import export_onnx
from paceline.core._distributed_context import DistributedContext
from paceline.declarative._losses import LossTracker
from paceline.declarative._training_step import Step
from paceline.storage._checkpoint_errors import CheckpointError
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._retention_rules import Kept, RetentionRules
from paceline.storage._storage_from_url import storage_from

logger = logging.getLogger(__name__)

STATE_FILE = "checkpoint.state"
CHECKPOINTS = "checkpoints"
_FORMAT = "paceline.declarative"
# How a zip archive and a pickle begin.
_PICKLES = (b"PK\x03\x04", b"\x80")
_ENCODERS = ("backbone_model", "encoder")


class SavedRun(NamedTuple):
    """The newest checkpoint of a run.

    Attributes:
        place: Its directory, or its URL in an object store.
        seed: The seed of the run.
        num_shards: Into how many shards a global batch is cut.
        uuids: The checkpoints that are kept, the newest last.
        storage: Where they are.
    """

    place: str
    seed: int
    num_shards: int
    uuids: list[str]
    storage: CheckpointStorage


def write_state(
    save_dir: Path, *, seed: int, num_shards: int, uuids: list[str], storage: CheckpointStorage
) -> None:
    """Write the names and place of a run's kept checkpoints, atomically."""
    facts = {"format": _FORMAT, "seed": seed, "num_shards": num_shards, "checkpoints": uuids}
    if storage.local_root != (save_dir / CHECKPOINTS).absolute():
        # Storage outside of `save_dir` is recorded; checkpoints inside move with the directory.
        facts["storage"] = storage.url
    with replacing_atomically(save_dir / STATE_FILE) as file:
        file.write_text(json.dumps(facts, indent=2) + "\n")


def read_state(
    save_dir: str | os.PathLike[str], distributed: DistributedContext | None = None
) -> SavedRun:
    """Return where a run stands.

    Args:
        save_dir: The directory of the run.
        distributed: Where the ranks meet, if there are several: all read the file that the chief
            finds, as the chief alone writes the state, perhaps later than another rank looks.

    Raises:
        FileNotFoundError: The directory has no state.
        ValueError: The state was not written by Paceline.
    """
    path = Path(save_dir) / STATE_FILE
    content = path.read_bytes() if path.is_file() else None
    if distributed is not None:
        content = distributed.broadcast(content)
    if content is None:
        raise FileNotFoundError(
            f"`checkpoint_dir` must be the `model_save_dir` of an earlier run, but"
            f" {str(save_dir)!r} has no {STATE_FILE}."
        )
    if content.startswith(_PICKLES):
        raise ValueError(
            f"`checkpoint_dir` must hold a {STATE_FILE} that Paceline wrote, but that of"
            f" {str(save_dir)!r} was written by torch.save, as generic_trainer does. Hint:"
            " `pretrained_model_path` with its checkpoint_model.pth begins with the weights."
        )
    try:
        facts = json.loads(content)
        if facts.get("format") != _FORMAT:
            raise ValueError(f"its format is {facts.get('format')!r}")
        uuids = [str(uuid) for uuid in facts["checkpoints"]]
        storage = storage_from(facts.get("storage", path.parent / CHECKPOINTS))
        place = f"{storage.url}/{uuids[-1]}"
        return SavedRun(place, int(facts["seed"]), int(facts["num_shards"]), uuids, storage)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"`checkpoint_dir` must hold a {STATE_FILE} that Paceline wrote, but that of"
            f" {str(save_dir)!r} cannot be read ({type(error).__name__}: {error})."
        ) from error


def check_save_dir(path: str) -> None:
    """Refuse a `model_save_dir` other than a writable or creatable directory.

    Raises:
        ValueError: It is a file, lies below one, or cannot be written to.
    """
    place = Path(path).absolute()
    found = next(each for each in (place, *place.parents) if os.path.lexists(each))
    if not found.is_dir():
        raise ValueError(
            f"`model_save_dir` must be a directory, but got {path!r}, and {str(found)!r} is none."
        )
    if not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(
            f"`model_save_dir` must be a directory that can be written to, but {str(found)!r} is"
            " none."
        )


def checkpoints_in(save_dir: Path) -> list[str]:
    """Return the existing checkpoints listed in a run's state, the newest last."""
    try:
        state = read_state(save_dir)
    except (FileNotFoundError, ValueError):
        return []
    return [uuid for uuid in state.uuids if _is_there(state.storage, uuid)]


def _is_there(storage: CheckpointStorage, uuid: str) -> bool:
    try:
        return storage.exists(uuid)
    except CheckpointError:
        # A damaged one takes up space as well.
        return True


def save_weights(state: Mapping[str, Any], path: Path) -> None:
    """Write a module's weights, as a whole or not at all; `torch.load` reads them."""
    with replacing_atomically(path) as file:
        torch.save(state, file)


def load_weights(module: nn.Module, path: str | os.PathLike[str], prefix: str = "") -> None:
    """Load weights written by `save_weights` or `torch.save`, from any device, to the CPU.

    Args:
        module: The module.
        path: The file.
        prefix: Where the module lies in the model of the file, if that is a whole one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no weights, or weights of another model.
    """
    try:
        # A full pickle could run any code, and the file may come from anywhere.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`pretrained_model_path` must be a file of weights, but {str(path)!r} is not there."
        ) from error
    except (
        UnpicklingError,
        IsADirectoryError,
        RuntimeError,
        EOFError,
        LookupError,
        ValueError,
    ) as error:
        raise ValueError(
            f"`pretrained_model_path` must be a file of weights, but {str(path)!r} cannot be read:"
            f" {error}"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(
            f"`pretrained_model_path` must hold weights by name, but {str(path)!r} holds a"
            f" {type(state).__name__}."
        )
    try:
        module.load_state_dict(_below(state, prefix))
    except RuntimeError as error:
        raise ValueError(
            f"`pretrained_model_path` must hold the weights of this model, but {str(path)!r}:"
            f" {error}"
        ) from error


def encoder_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the name and module of a model's encoder.

    Raises:
        ValueError: It has none.
    """
    for name in _ENCODERS:
        found = getattr(model, name, None)
        if isinstance(found, nn.Module):
            return name, found
    raise ValueError(
        f"`load_pretrained_encoder_only` needs a model with a `backbone_model` or an `encoder`, but"
        f" {type(model).__name__} has neither."
    )


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the part of a whole model's weights; weights of a part stay unchanged."""
    start = f"{prefix}."
    part = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
    return part if prefix and part else dict(state)


def _history_figure(num_rows: int) -> tuple[Any, list[Any]]:
    # Without pyplot there is no window and no state that other figures share.
    library = required_library("matplotlib.figure", "A plot", "paceline[plot]")
    figure = library.Figure(figsize=(8, 3 * num_rows), layout="constrained")
    return figure, list(figure.subplots(num_rows, squeeze=False)[:, 0])


def plot_history(
    path: Path, rows: Sequence[tuple[str, Mapping[str, Sequence[float]]]], x_label: str
) -> Any:
    """Draw curves below each other into a PNG file, and return the figure of matplotlib.

    Args:
        path: The file.
        rows: The label of each picture's axis, and its curves by name.
        x_label: The label of the common axis.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, axes = _history_figure(len(rows))
    for axis, (label, curves) in zip(axes, rows, strict=True):
        for name, values in curves.items():
            if len(values):
                axis.plot(range(len(values)), values, label=name, marker="." * (len(values) < 100))
        axis.set_ylabel(label)
        axis.grid(visible=True)
        if axis.lines:
            axis.legend()
    axes[-1].set_xlabel(x_label)
    figure.savefig(path)
    return figure


# A run without a master keeps the newest checkpoint, and one more in case that is damaged.
_NUM_KEPT = 2
_LOSSES = ("loss", "val_loss", "test_loss")
_PARTS = ("train", "val", "test")
# Files that a run writes besides checkpoints and pictures: moved aside by a new run.
_WRITTEN = ("best_model.*", "final_model.*", "checkpoint_model.*", "training_info.txt")
_DRAWN = ("lr_history.png", "loss_history.png", "acc_history_*.png")


class Outputs(Step):
    """Mixin of a trainer: writes weights, states, histories and pictures.

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
            subcomponent: The part of the model to write; the whole model by default.
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
            # Training continues with the random numbers that it would have without this.
            with torch.random.fork_rng():
                batch = next(iter(self.validation_dataloader))
                data, _ = self.divided(batch)
                # Names fit the outputs of the whole model only; a part's outputs are unknown.
                names = [prediction.name for prediction in self.predictions]
                export_onnx(
                    part,
                    data,
                    (self._save_dir / filename).with_suffix(".onnx"),
                    None if subcomponent is not None else names,
                )

    def save_model_and_states_checkpoint(self) -> None:
        """Store the whole state, to resume from, and the weights as checkpoint_model.pth."""
        self._engine.save_checkpoint()
        self.update_saved_model("checkpoint_model.pth")

    def write_training_info(self) -> None:
        """Write the loss tracker as training_info.txt; on the chief alone."""
        if self.rank == 0:
            self.loss_tracker.dump(self._save_dir / "training_info.txt")

    def set_earlier_files_aside(self) -> None:
        """Move another run's files in `model_save_dir` to a subdirectory.

        Its best model would otherwise count as this run's best, which may never have one.
        """
        if self.rank != 0 or self._is_continued:
            return
        kept = self.configs.pretrained_model_path
        found = [path for pattern in (*_WRITTEN, *_DRAWN) for path in self._save_dir.glob(pattern)]
        # The weights to begin with are an input, not an earlier run's output.
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
        """Record a stored checkpoint in the state file, and delete all but the newest."""
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
        """Return the retention of a run's newest checkpoints; deletes the others.

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
            dataset: "train" for the training data, else the validation data.
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

    def plot_training_history(self) -> Any:
        """Draw the losses into loss_history.png in `model_save_dir`, and return the figure.

        The learning rate goes into lr_history.png. Other ranks than the chief return None.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if self.rank != 0:
            return None
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
        return plot_history(Path(self.configs.model_save_dir) / "loss_history.png", rows, "Epoch")

    def plot_accuracy_history(self) -> dict[str, Any]:
        """Draw the accuracies of each prediction into acc_history_<name>.png.

        Returns:
            The figures by the names of the predictions; none on other ranks than the chief.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if self.rank != 0:
            return {}
        figures = {}
        for name in self.loss_tracker.pred_names:
            curves = {part: self.loss_tracker[f"{part}_acc_{name}"] for part in _PARTS}
            path = Path(self.configs.model_save_dir) / f"acc_history_{name}.png"
            figures[name] = plot_history(path, [(f"Accuracy of {name}", curves)], "Epoch")
        return figures
