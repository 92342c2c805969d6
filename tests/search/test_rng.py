from __future__ import annotations

import json
from typing import Any

import pytest

from paceline._base.arguments_and_errors import Rng
from paceline.search import Create, Started
from paceline.search._grid_random_single import RandomConfig
from paceline.search._search import Search

CONFORMANCE = [
    pytest.param(
        0,
        0,
        (0.3646440511781974, 0.0072570057215942734, 4, "adam"),
        "d3dea19f-1551-49a5-b2d6-666224b70570",
        1277901399,
        id="S-1",
    ),
    pytest.param(
        0,
        1,
        (0.46753190023462393, 0.07155682161754859, 2, "rmsprop"),
        "274aeacf-57a8-4587-aec8-df7a585e6b91",
        1686997841,
        id="S-2",
    ),
    pytest.param(
        42,
        0,
        (0.3123620356542087, 0.06351221010640692, 8, "sgd"),
        "142ccb98-66d6-4027-b918-2272d241ef27",
        429389014,
        id="S-4",
    ),
]


@pytest.mark.parametrize(("seed", "index", "values", "request_id", "trial_seed"), CONFORMANCE)
def test_seed_gives_the_documented_trials(
    space: dict[str, Any],
    seed: int,
    index: int,
    values: tuple[float, float, int, str],
    request_id: str,
    trial_seed: int,
) -> None:
    config = RandomConfig(metric="loss", max_trials=4, max_concurrent_trials=2)
    operations = Search(config, space, seed).apply(Started())
    create = [op for op in operations if isinstance(op, Create)][index]
    drop, lr, n, opt = values
    assert create.hparams == {
        "drop": pytest.approx(drop, rel=1e-12),
        "lr": pytest.approx(lr, rel=1e-12),
        "n": n,
        "opt": opt,
    }
    assert (create.request_id, create.trial_seed) == (request_id, trial_seed)


def test_integers_follow_the_frozen_stream() -> None:
    # S-6.
    rng = Rng(42)
    assert [rng.integer(0, 9) for _ in range(10)] == [6, 3, 7, 4, 6, 9, 2, 6, 7, 4]


def test_a_single_choice_draws_nothing() -> None:
    rng = Rng(7)
    assert rng.integer(5, 5) == 5
    assert rng.real() == Rng(7).real()


@pytest.mark.parametrize("num_draws", [0, 1, 311, 623, 624, 625])
def test_snapshot_continues_the_stream_exactly(num_draws: int) -> None:
    rng = Rng(3)
    for _ in range(num_draws):
        rng.integer(0, 999)
    twin = Rng.from_snapshot(json.loads(json.dumps(rng.snapshot())))
    for _ in range(700):
        assert twin.real() == rng.real()
        assert twin.request_id() == rng.request_id()
        assert twin.trial_seed() == rng.trial_seed()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", True, None])
def test_wrong_seed_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="`seed` must be an integer from 0 to 4294967295"):
        Rng(seed)


@pytest.mark.parametrize("snapshot", [{}, {"algorithm": "pcg64", "words": [1] * 624}])
def test_snapshot_of_another_stream_is_refused(snapshot: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must hold the `mt19937` algorithm and its 624 words"):
        Rng.from_snapshot(snapshot)
