"""The default train and validation functions: one model, one optimizer, one scheduler."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from paceline.core import DistributedContext
from paceline.creators._binding import Given
from paceline.engine import Pass, Precision, StepTimer, WeightedMeans

Measure = Callable[[str], AbstractContextManager[None]]


def train_one_model(
    given: Given,
    batches: Pass,
    precision: Precision,
    measure: Measure | None,
    *,
    steps_scheduler: bool,
) -> dict[str, Any]:
    """Train one model on the batches of a pass, each ``(*features, target)``.

    Raises:
        ValueError: There are several models, optimizers or schedulers.
    """
    _check_single(given, "train_function")
    is_plain = measure is None and precision is Precision.FP32
    step = _plain_step(given) if is_plain else _measured_step(given, precision, measure)
    means = _LocalMeans()
    given.optimizers.zero_grad()
    for batch in batches:
        features, target = _split(batch)
        loss = step(features, target)
        if steps_scheduler:
            given.schedulers.step()
        means.add({"train_loss": loss}, batches.num_own)
    return means.statistics()


def _plain_step(given: Given) -> Callable[[Any, Any], Any]:
    model, criterion, optimizer = given.models, given.criterion, given.optimizers

    def step(features: Any, target: Any) -> Any:
        loss = criterion(model(*features), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _measured_step(
    given: Given, precision: Precision, measure: Measure | None
) -> Callable[[Any, Any], Any]:
    """Return what `_plain_step` does, with a precision and what measures its parts."""
    model, criterion, optimizer = given.models, given.criterion, given.optimizers
    scaler, measure = given.scaler, measure or _measure_nothing

    def step(features: Any, target: Any) -> Any:
        with measure("fwd"), precision.autocast(given.device):
            loss = criterion(model(*features), target)
        with measure("grad"):
            (loss if scaler is None else scaler.scale(loss)).backward()
        with measure("apply"):
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        return loss

    return step


def validate_one_model(
    given: Given, batches: Pass, precision: Precision, measure: Measure | None
) -> dict[str, Any]:
    """Validate one model on the batches of a pass, each ``(*features, target)``.

    There is an accuracy where targets are class indices and outputs have a value for each class.

    Raises:
        ValueError: There are several models, optimizers or schedulers.
    """
    _check_single(given, "validation_function")
    model, criterion, means = given.models, given.criterion, _LocalMeans()
    measure = measure or _measure_nothing
    with torch.no_grad():
        for batch in batches:
            features, target = _split(batch)
            with measure("fwd"), precision.autocast(given.device):
                output = model(*features)
                metrics = {"val_loss": criterion(output, target)}
            if _are_classes(output, target):
                metrics["val_accuracy"] = (output.argmax(1) == target).float().mean()
            means.add(metrics, batches.num_own)
    return means.statistics()


class StepTimes:
    """The seconds of the parts of each step, for `profile`."""

    def __init__(self, device: torch.device) -> None:
        self._timer = StepTimer(device)

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Add the time of a block to a part."""
        return self._timer.measure(part)

    def means(self, whole: str, num_batches: int) -> dict[str, float]:
        """Return the time of the pass, and the mean of each part over its batches.

        Args:
            whole: The part that the pass as a whole is.
            num_batches: The batches of the pass.
        """
        parts = self._timer.take()
        times = {f"mean_{whole}_s": parts.pop(whole)}
        return times | {f"mean_{name}_s": time / num_batches for name, time in parts.items()}


@contextmanager
def measured_pass(times: StepTimes | None, whole: str) -> Iterator[Measure | None]:
    """Return what measures the parts of a pass, or None if there is nothing to keep."""
    if times is None:
        yield None
        return
    with times.measure(whole):
        yield times.measure


_nothing = nullcontext()


def _measure_nothing(part: str) -> AbstractContextManager[None]:
    return _nothing


class _LocalMeans:
    """Means over this worker's own samples, and the values of the last batch."""

    def __init__(self) -> None:
        self._means = WeightedMeans(DistributedContext.single(), "pass")
        self._last: dict[str, torch.Tensor] = {}

    def add(self, metrics: dict[str, torch.Tensor], num_samples: int) -> None:
        # Without samples of its own a worker only takes part in what needs all of them.
        if num_samples:
            self._means.add(metrics, num_samples)
            self._last = metrics

    def statistics(self) -> dict[str, Any]:
        means = self._means.reduce() or {}
        statistics: dict[str, Any] = {}
        for name, last in self._last.items():
            statistics |= {name: means[name], f"last_{name}": last.item()}
        return statistics


def _check_single(given: Given, argument: str) -> None:
    several = [
        f"{len(values)} {what}"
        for what, values in (
            ("models", given.models),
            ("optimizers", given.optimizers),
            ("schedulers", given.schedulers),
        )
        if isinstance(values, list)
    ]
    if several:
        raise ValueError(
            f"`{argument}` must be given with several models, optimizers or schedulers, but the"
            f" creators returned {', '.join(several)} and it is missing."
        )


def _split(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (list, tuple)) or len(batch) < 2:
        raise TypeError(
            "A batch must be a list or tuple of features and a target, but is a"
            f" {type(batch).__name__}. Hint: give a `train_function` and a `validation_function`"
            " of your own."
        )
    return batch[:-1], batch[-1]


def _are_classes(output: Any, target: Any) -> bool:
    are_tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if not are_tensors or target.is_floating_point():
        return False
    return bool(output.dim() > 1 and output.shape[:1] + output.shape[2:] == target.shape)
