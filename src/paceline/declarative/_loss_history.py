"""The history of the losses of a training."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline._atomic_files import replacing_atomically

logger = logging.getLogger(__name__)

_TYPES = ("loss", "val_loss", "test_loss")


class LossTracker(dict[str, Any]):
    """Losses by epoch, in lists by name.

    `loss`, `val_loss` and `test_loss` are totals, and with `_<name>` behind them those of each
    prediction and regularizer; `train_acc_<name>`, `val_acc_<name>` and `test_acc_<name>` are
    accuracies, `epochs` the epochs, and `lrs` the learning rates after each batch.
    `best_val_loss` is the least total of validations, `epoch_best_val_loss` its epoch, and
    `best_val_loss_<name>` are the parts of that one.

    Args:
        pred_names: The names of the predictions.
        terms: The names of all losses that make up the total; the predictions by default.
    """

    def __init__(self, pred_names: Sequence[str], terms: Sequence[str] | None = None) -> None:
        super().__init__()
        self.pred_names = tuple(pred_names)
        self.terms = tuple(pred_names if terms is None else terms)
        for name in ("epochs", *_TYPES, "lrs"):
            self[name] = []
        self["best_val_loss"], self["epoch_best_val_loss"] = math.inf, 0
        for term in self.terms:
            self.update({f"{kind}_{term}": [] for kind in _TYPES})
            self[f"best_val_loss_{term}"] = math.inf
        for name in self.pred_names:
            self.update({f"{part}_acc_{name}": [] for part in ("train", "val", "test")})

    @property
    def current_epoch(self) -> int:
        """The last epoch that was trained, from 0; -1 before the first."""
        return self["epochs"][-1] if self["epochs"] else -1

    def update_losses(
        self,
        losses: Sequence[float],
        type: str = "loss",
        epoch: int | None = None,
        lr: float | None = None,
    ) -> bool:
        """Add the losses of an epoch.

        Args:
            losses: The total, then each term.
            type: "loss", "val_loss" or "test_loss".
            epoch: The epoch; the next one by default. Training losses begin a new one.
            lr: A learning rate to add.

        Returns:
            Whether it is the least total of validations so far.

        Raises:
            ValueError: `type` is unknown, or there are not as many losses as terms.
        """
        if type not in _TYPES:
            raise ValueError(f"`type` must be one of {', '.join(_TYPES)}, but got {type!r}.")
        if len(losses) != len(self.terms) + 1:
            raise ValueError(
                f"`losses` must hold the total and {len(self.terms)} terms, but got {losses!r}."
            )
        if type == "loss":
            self["epochs"].append(self.current_epoch + 1 if epoch is None else epoch)
        if lr is not None:
            self["lrs"].append(lr)
        self[type].append(losses[0])
        for term, value in zip(self.terms, losses[1:], strict=True):
            self[f"{type}_{term}"].append(value)
        if type != "val_loss" or not losses[0] < self["best_val_loss"]:
            return False
        self["best_val_loss"] = losses[0]
        self["epoch_best_val_loss"] = self.current_epoch if epoch is None else epoch
        for term, value in zip(self.terms, losses[1:], strict=True):
            self[f"best_val_loss_{term}"] = value
        return True

    def update_accuracies(self, metrics: Mapping[str, Any], part: str) -> None:
        """Add the accuracies of an epoch, `<part>_acc_<name>`, that are among its metrics.

        Args:
            metrics: The metrics by name.
            part: "train", "val" or "test".
        """
        for name in self.pred_names:
            key = f"{part}_acc_{name}"
            if key in metrics:
                self[key].append(metrics[key])

    def get_all_losses(self, type: str = "loss") -> list[list[float]]:
        """Return the total's history and those of the terms.

        Args:
            type: "loss", "val_loss" or "test_loss".
        """
        return [self[type], *(self[f"{type}_{term}"] for term in self.terms)]

    def get_metric_names_for_hyperparam_tuning(self) -> list[str]:
        """Return the names of what a search may minimise."""
        best = [f"best_val_loss_{term}" for term in self.terms]
        return ["best_val_loss", *best, "epoch_best_val_loss"]

    def print_losses(self) -> None:
        """Log the losses of the last epoch; the first one is 1 here."""
        epoch = self.current_epoch + 1
        for term in ("", *(f"_{term}" for term in self.terms)):
            shown = [
                f"{label} {self[f'{kind}{term}'][-1]:.5g}"
                for kind, label in zip(_TYPES, ("training", "validation", "test"), strict=True)
                if self[f"{kind}{term}"]
            ]
            name = f" of {term[1:]}" if term else ""
            logger.info("Epoch %d: loss%s: %s", epoch, name, ", ".join(shown))

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write all as lines `name = value`, with values as JSON.

        Args:
            path: The file; it is replaced as a whole.
        """
        with replacing_atomically(Path(path)) as file:
            file.write_text("".join(f"{key} = {json.dumps(self[key])}\n" for key in self))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what `dump` wrote.

        Raises:
            ValueError: The file holds something else.
        """
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            name, equals, text = line.partition(" = ")
            try:
                self[name] = json.loads(text)
            except ValueError:
                equals = ""
            if not equals:
                raise ValueError(
                    f"`path` must hold lines `name = value`, but line {number} of {path} is"
                    f" {line[:80]!r}."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return all for a checkpoint."""
        return {**self, "lrs": torch.tensor(self["lrs"], dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.update(state)
        self["lrs"] = state["lrs"].tolist()
