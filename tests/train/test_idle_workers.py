"""Workers without a shard of the global batch: a run that went on with more workers than shards."""

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from paceline import data, train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUMBERS = data.Dataset([torch.tensor([float(n)]) for n in range(8)])


@pytest.fixture(scope="module")
def trainer() -> Iterator[train.Trainer]:
    """Return a trainer of two workers, one of which has no shard of what one worker began."""
    with train.Trainer(num_workers=2, cluster="local") as trainer:
        yield trainer


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as the workers stay."""


def fit(config: dict[str, Any]) -> tuple[float, list[list[float]], int]:
    """Train one weight, without a step if told so, and save after each batch."""
    model: Any = train.prepare_model(nn.Linear(1, 1, bias=False).double())
    with torch.no_grad():
        next(iter(model.parameters())).fill_(1.0)
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    if not config["is_training"]:
        model.eval()
    loader = train.get_dataset().get_shard().to_torch(batch_size=2)
    state = train.load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
    seen = []
    for batch in loader:
        seen.append(batch.flatten().tolist())
        if config["has_steps"]:
            optimizer.zero_grad()
            # The idle rank has other values, so that any weight above 0 would tell.
            train.backward(model((batch + 100 * train.world_rank()).double()).mean())
            optimizer.step()
        train.save_checkpoint(model=model)
        if config["stops_after"] == len(seen):
            break
    weight = next(iter(model.parameters())).item()
    return weight, seen, train.world_size()


def settings(**more: Any) -> dict[str, Any]:
    return {"is_training": True, "has_steps": True, "stops_after": 0, **more}


def begun(**more: Any) -> train.Checkpoint:
    """Return the checkpoint of one worker after the first of four batches."""
    results = train.Trainer(num_workers=0).run(
        fit, settings(stops_after=1, **more), dataset=NUMBERS
    )
    return results.checkpoints[-1]


@pytest.mark.parametrize("is_training", [True, False])
def test_a_loop_without_steps_has_its_checkpoints(
    trainer: train.Trainer, is_training: bool
) -> None:
    options = {"is_training": is_training, "has_steps": False}
    results = trainer.run(fit, settings(**options), dataset=NUMBERS, checkpoint=begun(**options))
    assert [size for _, _, size in results] == [2, 2]
    # The chief has trained what was left, and each of its checkpoints exists.
    assert results[0][1] == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert len(results.checkpoints) == 3
    again = trainer.run(
        fit, settings(**options), dataset=NUMBERS, checkpoint=results.checkpoints[0]
    )
    assert again[0][1] == [[4.0, 5.0], [6.0, 7.0]]


def test_samples_of_an_idle_worker_do_not_count_in_gradients(trainer: train.Trainer) -> None:
    start = begun()
    results = trainer.run(fit, settings(), dataset=NUMBERS, checkpoint=start)
    # The gradient of the mean of `w * x` is the mean of x: 0.5, 2.5, 4.5 and 6.5.
    expected = 1.0 - 0.01 * (0.5 + 2.5 + 4.5 + 6.5)
    assert [weight for weight, _, _ in results] == pytest.approx([expected, expected])
    # The idle worker's loop gets the samples of the first one.
    assert results[1][1] == results[0][1]
    again = trainer.run(fit, settings(), dataset=NUMBERS, checkpoint=results.checkpoints[0])
    assert [weight for weight, _, _ in again] == pytest.approx([expected, expected])
