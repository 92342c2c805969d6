"""Default functions that train and validate one model on a batch."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from paceline._training.engine.precision import Precision
from paceline._training.engine.verify_steps import StepReplay
from paceline.creators._pass_reports import LocalMeans, Measure

if TYPE_CHECKING:
    from paceline.creators._passes import Pass
from paceline.creators._creator_arguments import GivenParameters


def train_one_model(
    given: GivenParameters,
    batches: "Pass",
    precision: Precision,
    measure: Measure | None,
    *,
    steps_scheduler: bool,
    means: LocalMeans,
    replay: StepReplay | None = None,
) -> dict[str, Any]:
    """Train a model on the batches of a pass, each ``(*features, target)``.

    Raises:
        NonFiniteError: A loss was not finite and training is to stop then.
        ValueError: There are several models, optimizers or schedulers.
    """
    _check_single(given, "train_function")
    is_plain = measure is None and precision is Precision.FP32 and replay is None
    step = _plain_step(given) if is_plain else _measured_step(given, precision, measure, replay)
    given.optimizers.zero_grad()
    for number, batch in enumerate(batches, given.info["global_step"]):
        features, target = _split(batch)
        loss = step(features, target)
        if steps_scheduler:
            given.schedulers.step()
        means.add({"train_loss": loss}, batches.num_own, number)
    return means.statistics()


def _plain_step(given: GivenParameters) -> Callable[[Any, Any], Any]:
    model, criterion, optimizer = given.models, given.criterion, given.optimizers

    def step(features: Any, target: Any) -> Any:
        loss = criterion(model(*features), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _measured_step(
    given: GivenParameters, precision: Precision, measure: Measure | None, replay: StepReplay | None
) -> Callable[[Any, Any], Any]:
    """Return a step like `_plain_step`, with a precision, timed parts and a check."""
    model, criterion, optimizer = given.models, given.criterion, given.optimizers
    scaler, measure = given.scaler, measure or _measure_nothing
    num_steps = itertools.count(given.info["global_step"])

    def compute(features: Any, target: Any) -> Any:
        with measure("fwd"), precision.autocast(given.device):
            loss = criterion(model(*features), target)
        with measure("grad"):
            (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    def step(features: Any, target: Any) -> Any:
        number = next(num_steps)
        if replay is not None and replay.is_due(number):
            loss = replay.run(lambda: compute(features, target), number)
        else:
            loss = compute(features, target)
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
    given: GivenParameters, batches: "Pass", precision: Precision, measure: Measure | None
) -> dict[str, Any]:
    """Validate a model on the batches of a pass, each ``(*features, target)``.

    There is an accuracy where targets are class indices and outputs have a value for each class.

    Raises:
        ValueError: There are several models, optimizers or schedulers.
    """
    _check_single(given, "validation_function")
    model, criterion, means = given.models, given.criterion, LocalMeans()
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


_nothing = nullcontext()


def _measure_nothing(part: str) -> AbstractContextManager[None]:
    return _nothing


def _check_single(given: GivenParameters, argument: str) -> None:
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
