"""Properties that every search has, whatever its trials do and in whatever order."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.search import (
    AdaptiveAshaConfig,
    AsyncHalvingConfig,
    Create,
    Exited,
    ExitReason,
    GridConfig,
    Input,
    Mode,
    Operation,
    Progressed,
    RandomConfig,
    Reported,
    Search,
    SearchConfig,
    Shutdown,
    SingleConfig,
    Started,
    Stop,
    Train,
    replay,
)

SPACE: dict[str, Any] = {
    "net": {"width": {"type": "int", "minval": 1, "maxval": 9, "count": 3}},
    "lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1, "count": 2},
}
_COMMON: dict[str, Any] = {
    "metric": st.just("loss"),
    "max_concurrent_trials": st.integers(0, 5),
}
_HALVING: dict[str, Any] = {
    **_COMMON,
    "smaller_is_better": st.booleans(),
    "max_trials": st.integers(1, 12),
    "max_time": st.integers(1, 30),
    "time_metric": st.just("batches"),
    "divisor": st.sampled_from([1.5, 2, 3, 4]),
}
sys.path.append(str(Path(__file__).parents[2] / "examples" / "plugins"))
MedianConfig = importlib.import_module("median_stopping").MedianConfig

CONFIGS: st.SearchStrategy[SearchConfig] = st.one_of(
    st.builds(
        MedianConfig,
        **_COMMON | {"max_concurrent_trials": st.integers(1, 5)},
        smaller_is_better=st.booleans(),
        max_trials=st.integers(1, 12),
        max_time=st.integers(1, 30),
        min_time=st.integers(1, 30),
        min_others=st.integers(1, 3),
    ),
    st.builds(SingleConfig, metric=st.just("loss")),
    st.builds(RandomConfig, max_trials=st.integers(1, 8), **_COMMON),
    st.builds(GridConfig, **_COMMON),
    st.builds(AsyncHalvingConfig, num_rungs=st.integers(1, 4), **_HALVING),
    st.builds(
        AdaptiveAshaConfig,
        mode=st.sampled_from(Mode),
        max_rungs=st.integers(1, 4),
        bracket_rungs=st.lists(st.integers(1, 4), max_size=3),
        **_HALVING,
    ),
)
# Few values, so that ties are common.
METRICS = st.sampled_from([0.1, 0.2, 0.3, 0.4, float("nan"), float("inf"), float("-inf")])


@dataclass
class _Drive:
    """Drives a search by drawn choices until it ends; invalid trials are rationed."""

    data: st.DataObject
    search: Search
    inputs: list[Input] = field(default_factory=list)
    operations: list[list[Operation]] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    num_invalid: int = 0

    def give(self, given: Input) -> None:
        operations = self.search.apply(given)
        self.inputs.append(given)
        self.operations.append(operations)
        for operation in operations:
            if isinstance(operation, Create):
                self.running.append(operation.request_id)
            elif isinstance(operation, Train):
                self.targets[operation.request_id] = operation.length
            elif isinstance(operation, Stop):
                self.stopped.add(operation.request_id)

    def step(self) -> None:
        request_id = self.data.draw(st.sampled_from(self.running))
        action = self.data.draw(st.sampled_from(["report", "early", "skip", "progress", "exit"]))
        if action == "progress":
            progress = self.data.draw(st.floats())
            self.give(Progressed(request_id=request_id, progress=progress))
        elif action == "exit" or request_id in self.stopped:
            reasons = list(ExitReason) if self.num_invalid < 3 else list(ExitReason)[:3]
            reason = self.data.draw(st.sampled_from(reasons))
            self.num_invalid += reason is ExitReason.INVALID_HP
            self.running.remove(request_id)
            self.give(Exited(request_id=request_id, reason=reason))
        else:
            factor = {"report": 1, "early": 0.5, "skip": 5}[action]
            time = self.targets[request_id] * factor
            metric = self.data.draw(METRICS)
            self.give(Reported(request_id=request_id, time=time, metric=metric))

    def run(self, max_steps: int = 400) -> None:
        self.give(Started())
        for _ in range(max_steps):
            if not self.running:
                return
            self.step()
        # What is left ends in order: the search must come to its end by itself.
        while self.running:
            self.give(Exited(request_id=self.running.pop(0), reason=ExitReason.COMPLETED))


def _flat(operations: list[list[Operation]]) -> list[Operation]:
    return [operation for group in operations for operation in group]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_every_search_ends_within_its_budget(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = _Drive(data, Search(config, SPACE, seed))
    drive.run()
    operations = _flat(drive.operations)
    assert isinstance(operations[-1], Shutdown)
    assert sum(isinstance(op, Shutdown) for op in operations) == 1
    num_created = sum(isinstance(op, Create) for op in operations)
    invalid = sum(t.exit_reason is ExitReason.INVALID_HP for t in drive.search.trials())
    budget = {"single": 1, "grid": 6}.get(config.kind) or config.max_trials  # type: ignore[union-attr]
    # The original lost trials and could exceed the budget; here it is met exactly.
    replaced = invalid if config.kind not in ("single", "grid") else 0
    assert num_created == budget + replaced


@settings(max_examples=100, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_restored_search_goes_on_as_the_straight_one(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = _Drive(data, Search(config, SPACE, seed))
    drive.run(max_steps=40)
    restored = Search(config, SPACE, seed)
    for given_input, expected in zip(drive.inputs, drive.operations, strict=True):
        text = json.dumps(restored.snapshot(), allow_nan=False)
        restored = Search.restore(config, SPACE, json.loads(text))
        assert json.dumps(restored.snapshot(), allow_nan=False) == text
        assert restored.apply(given_input) == expected
    assert restored.snapshot() == drive.search.snapshot()
    assert restored.progress() == drive.search.progress()
    assert restored.trials() == drive.search.trials()
    assert repr(restored.rungs()) == repr(drive.search.rungs())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_replayed_inputs_give_the_live_decisions(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = _Drive(data, Search(config, SPACE, seed))
    drive.run(max_steps=60)
    assert replay(config, SPACE, seed, drive.inputs) == drive.operations


@settings(max_examples=60, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_views_and_progress_hold_at_every_point(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = _Drive(data, Search(config, SPACE, seed))
    drive.give(Started())
    for _ in range(40):
        assert 0 <= drive.search.progress() <= 1
        for bracket in drive.search.rungs():
            for rung in bracket.rungs:
                # One entry for each trial and rung, however often it reported.
                entered = Counter(entry.request_id for entry in rung.entries)
                assert max(entered.values(), default=1) == 1
        if not drive.running:
            break
        drive.step()
    ids = [op.request_id for op in _flat(drive.operations) if isinstance(op, Create)]
    assert [trial.request_id for trial in drive.search.trials()] == ids
    assert len(set(ids)) == len(ids)
    stops = [op.request_id for op in _flat(drive.operations) if isinstance(op, Stop)]
    assert len(set(stops)) == len(stops)
