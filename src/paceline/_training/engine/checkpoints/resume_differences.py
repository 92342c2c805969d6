"""Changes of optimizer and scheduler settings between a checkpoint and the resumed training."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch.optim.lr_scheduler import SequentialLR

from paceline._training.engine.lr_schedulers import load_scheduler, scheduler_state
from paceline._training.engine.schedules import Position
from paceline.data._order_and_random_generators import EpochOrder
from paceline.storage._checkpoint_errors import CheckpointMismatchError

logger = logging.getLogger(__name__)

# Options that need a state which an optimizer without them does not keep.
_NEEDED_STATES = {
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
    "momentum": "momentum_buffer",
}
# Repeats of an optimizer's learning rate: the rate itself is named once.
_REPEATED = ("initial_lr", "base_lrs", "_last_lr")


def built_settings(
    models: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    schedulers: Iterable[Any],
) -> dict[str, list[Any]]:
    """Return the settings of models, optimizers and schedulers before their first use."""
    settings: dict[str, list[Any]] = {
        "frozen": [frozen_parameters(model) for model in models],
        "optimizers": [[_options(group) for group in each.param_groups] for each in optimizers],
        # A scheduler of the user's own may have no state.
        "schedulers": [
            scheduler_state(each) if hasattr(each, "state_dict") else {} for each in schedulers
        ],
    }
    # A learning rate may be a tensor, which schedulers change in place.
    return deepcopy(settings)


def frozen_parameters(model: torch.nn.Module) -> list[str]:
    """Return the names of the currently frozen parameters."""
    return [name for name, value in model.named_parameters() if not value.requires_grad]


class SettingChanges:
    """Settings changed between a checkpoint and the present training.

    Args:
        then: What `built_settings` returned before the checkpoint; None if that does not hold it.
        now: Its value for the resumed training.
    """

    def __init__(self, then: Mapping[str, list[Any]] | None, now: Mapping[str, list[Any]]) -> None:
        self._then = then
        self._now = now
        # Text of a change to the set of its names: several groups may share a change.
        self._names: dict[str, dict[str, None]] = {}
        self._warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Keep a warning until `tell`, called by a single rank only."""
        self._warnings.append(text)

    def note(self, name: str, then: Any, now: Any) -> None:
        """Name a change."""
        self._names.setdefault(f"was {then} and is {now}", {})[name] = None

    def tell(self) -> None:
        """Log all warnings and changes, if there are any."""
        for text in self._warnings:
            logger.warning("%s", text)
        if self._names:
            logger.warning(
                "Training resumes with other settings than those of the checkpoint: %s.",
                "; ".join(f"{', '.join(names)} {text}" for text, names in self._names.items()),
            )

    def in_frozen(self, stored: Iterable[str], index: int) -> set[str]:
        """Return the names of a model's frozen parameters, with the changes applied."""
        frozen = {*stored}
        if self._then is None:
            return frozen
        then, now = self._then["frozen"][index], self._now["frozen"][index]
        for name in sorted({*then} ^ {*now}):
            self.note(f"{name!r} of model {index}", *_is_trained(name, then, now))
        return (frozen - {*then}.difference(now)) | {*now}.difference(then)

    def in_optimizer(self, state: dict[str, Any], index: int) -> dict[str, Any]:
        """Return an optimizer's stored state with the changes.

        A learning rate keeps the changes that schedulers made, in proportion.

        Raises:
            ValueError: An option was changed that needs a state which is not stored.
        """
        if self._then is None:
            return state
        then, now = self._then["optimizers"][index], self._now["optimizers"][index]
        name = f"optimizer {index}"
        groups = list(state["param_groups"])
        # Training may have added some.
        for number, (before, after) in enumerate(zip(then, now, strict=False)):
            group = groups[number]
            _check_needed(state["state"], before, after, name)
            groups[number] = {**group, **self._in_group(_options(group), before, after, name)}
        return {**state, "param_groups": groups}

    def load_scheduler(self, scheduler: Any, state: dict[str, Any], index: int) -> None:
        """Restore a scheduler's stored state with the changes, after its optimizer's state.

        With a changed option the learning rate is as in a training with that option from the start,
        where the scheduler has a formula for it.
        """
        num_noted = self._num_noted()
        if self._then is not None:
            then, now = self._then["schedulers"][index], self._now["schedulers"][index]
            state = self._in_record(state, then, now, f"scheduler {index}")
        load_scheduler(scheduler, state)
        if self._num_noted() > num_noted:
            # Many schedulers multiply the last rate, which fits the options of before.
            _set_by_formula(scheduler)

    def _num_noted(self) -> int:
        return sum(map(len, self._names.values()))

    def _in_group(
        self, stored: dict[str, Any], then: dict[str, Any], now: dict[str, Any], name: str
    ) -> dict[str, Any]:
        present = stored.pop("lr", None)
        merged = self._in_record(stored, then, now, name)
        if present is None:
            return merged
        # A scheduler that warms up has changed `lr` at once, and kept its first value.
        rates = [built.get("initial_lr", built["lr"]) for built in (then, now)]
        if not _is_same(*rates):
            self.note(f"{name}: lr", *rates)
            present = _in_proportion(present, *rates)
        return {**merged, "lr": present}

    def _in_record(
        self, stored: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any], name: str
    ) -> dict[str, Any]:
        return {
            key: self._in_value(value, then[key], now[key], key, name)
            if key in then and key in now
            else value
            for key, value in stored.items()
        }

    def _in_value(self, stored: Any, then: Any, now: Any, key: str, name: str) -> Any:
        parts = (stored, then, now)
        if all(map(_is_record, parts)):
            return self._in_record(stored, then, now, name)
        if all(isinstance(part, list) and len(part) == len(now) for part in parts):
            each = zip(stored, then, now, strict=True)
            return [self._in_value(*values, key, name) for values in each]
        if _is_same(then, now):
            return stored
        if key == "_last_lr":
            return _in_proportion(stored, then, now)
        if key not in _REPEATED:
            self.note(f"{name}: {key}", then, now)
        return now


def _is_trained(name: str, *frozen: list[str]) -> list[str]:
    return ["frozen" if name in each else "trained" for each in frozen]


def _check_needed(
    states: Mapping[Any, Any], then: Mapping[str, Any], now: Mapping[str, Any], name: str
) -> None:
    for option, needed in _NEEDED_STATES.items():
        is_new = bool(now.get(option)) and not then.get(option)
        if is_new and any(state and needed not in state for state in states.values()):
            raise ValueError(
                f"{option!r} of {name} must stay {then.get(option)!r}, as the checkpoint does not"
                f" hold {needed!r}, which {now[option]!r} needs. Hint: begin a new training with"
                " the checkpoint's weights."
            )


def _set_by_formula(scheduler: Any) -> None:
    present = scheduler
    if isinstance(scheduler, SequentialLR):
        present = scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
    if not hasattr(present, "_get_closed_form_lr"):
        return
    rates = present._get_closed_form_lr()
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    present._last_lr = scheduler._last_lr = [g["lr"] for g in scheduler.optimizer.param_groups]


def _in_proportion(present: Any, then: Any, now: Any) -> Any:
    if _is_same(present, then):
        return now
    return present * (now / then) if then else now


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_record(value: Any) -> bool:
    """Return whether a value is a dictionary with text keys, unlike data by epoch number."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_same(first: Any, second: Any) -> bool:
    try:
        if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
            return torch.equal(torch.as_tensor(first).cpu(), torch.as_tensor(second).cpu())
        # NaN differs from itself.
        return bool(first == second) or bool(first != first and second != second)
    except (RuntimeError, TypeError, ValueError):
        # Values of a user's own, such as an array, or a tensor and None.
        return repr(first) == repr(second)


_NAMES_SHOWN = 3


def check_identity(
    stored: Mapping[str, Any] | None,
    present: Mapping[str, Any] | None,
    *,
    is_within_epoch: bool,
    warn: Callable[[str], None],
) -> None:
    """Compare the data of a checkpoint with the present ones.

    Args:
        stored: The identity of the data of the checkpoint; None if they had none.
        present: The identity of the present data.
        is_within_epoch: Whether the checkpoint lies within an epoch. If not, other data only
            cause a warning.
        warn: Called with the warning about other data.

    Raises:
        CheckpointMismatchError: They differ within an epoch; the message names the files.
    """
    if not stored or not present or _key(stored) == _key(present):
        return
    difference = _data_difference(stored, present)
    if is_within_epoch:
        raise CheckpointMismatchError(
            "The data must be those that the checkpoint was saved with, as it lies within an epoch,"
            f" but {difference}. Hint: give the data as they were, or go on with a checkpoint of"
            " the end of an epoch."
        )
    warn(f"The next epoch has other data than those before the checkpoint: {difference}.")


def _key(identity: Mapping[str, Any]) -> tuple[Any, ...]:
    return identity["digest"], identity.get("window"), identity.get("selection")


def _data_difference(stored: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    before, now = stored["prints"], present["prints"]
    name = present["name"]
    if stored["digest"] == present["digest"]:
        windows = stored.get("window"), present.get("window")
        if windows[0] == windows[1]:
            return f"`filter`, `split` or `to_cv` has selected other samples of {name!r}"
        return (
            f"of {name!r} other samples are mixed with each other (a window of {windows[0]} then,"
            f" of {windows[1]} now)"
        )
    parts = [
        f"{what} {_shown(names)}"
        for what, names in (
            ("changed:", [each for each in before if each in now and before[each] != now[each]]),
            ("missing:", [each for each in before if each not in now]),
            ("new:", [each for each in now if each not in before]),
        )
        if names and before and now
    ]
    counts = (
        f"{stored['files']} files with {stored['samples']} samples then, {present['files']} with"
        f" {present['samples']} now"
    )
    return f"{name!r} is not what it was ({'; '.join([*parts, counts])})"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{names[:_NAMES_SHOWN]}{more}"


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
    """Compare the epochs of a checkpoint with the epochs of the present data.

    Args:
        changes: Takes the changes.
        training: The checkpoint's state that all ranks share.
        position: Where the checkpoint lies.
        order: The samples of the resumed epoch; None if they are not known.

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
    """Compare the epoch of a checkpoint, saved within the epoch, with the present data."""
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
