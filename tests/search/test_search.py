from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from paceline.search import Create, Exited, ExitReason, Progressed, Reported, Shutdown, Started
from paceline.search._grid_random_single import GridConfig, RandomConfig, SingleConfig
from paceline.search._search import Search, replay

CONFIG = RandomConfig(metric="loss", max_trials=3)


def _begin(config: Any = CONFIG) -> tuple[Search, list[str]]:
    search = Search(config, {}, 0)
    return search, [op.request_id for op in search.apply(Started()) if isinstance(op, Create)]


@pytest.mark.parametrize(
    "given",
    [
        Reported(request_id="nobody", time=1, metric=1),
        Progressed(request_id="nobody", progress=1),
        Exited(request_id="nobody", reason=ExitReason.ERROR),
    ],
)
def test_unknown_trial_is_refused(given: Any) -> None:
    search, _ = _begin()
    with pytest.raises(ValueError, match="must name a trial .* but got 'nobody'"):
        search.apply(given)


def test_second_start_is_refused() -> None:
    search, _ = _begin()
    with pytest.raises(ValueError, match="`Started` must be given once"):
        search.apply(Started())


def test_foreign_input_is_refused() -> None:
    search, _ = _begin()
    wrong: Any = {"type": "started"}
    with pytest.raises(TypeError, match="`input` must be one of the inputs .* but got dict"):
        search.apply(wrong)


def test_second_exit_is_ignored() -> None:
    search, (first, *_) = _begin()
    search.apply(Exited(request_id=first, reason=ExitReason.ERROR))
    before = search.snapshot()
    assert search.apply(Exited(request_id=first, reason=ExitReason.COMPLETED)) == []
    assert search.snapshot() == before


def test_reports_and_progress_after_the_exit_are_ignored() -> None:
    search, (first, *_) = _begin()
    search.apply(Exited(request_id=first, reason=ExitReason.COMPLETED))
    before = search.snapshot()
    assert search.apply(Reported(request_id=first, time=1, metric=0)) == []
    assert search.apply(Progressed(request_id=first, progress=0.1)) == []
    assert search.snapshot() == before


@pytest.mark.parametrize(
    ("reasons", "failure", "cancel"),
    [
        (["completed", "error", "error"], False, False),
        (["error", "error", "error"], True, False),
        (["canceled", "canceled", "canceled"], False, True),
        (["canceled", "error", "error"], False, False),
        # The replacement of an invalid trial fails as well: nothing that counts has succeeded.
        (["invalid_hp", "error", "error", "error"], True, False),
        (["invalid_hp", "completed", "error", "error"], False, False),
        (["invalid_hp", "canceled", "canceled", "canceled"], False, True),
    ],
)
def test_shutdown_tells_how_the_search_ended(
    reasons: list[str], failure: bool, cancel: bool
) -> None:
    search, running = _begin()
    operations: list[Any] = []
    for reason in reasons:
        assert not search.is_over
        operations = search.apply(Exited(request_id=running.pop(0), reason=ExitReason(reason)))
        running += [op.request_id for op in operations if isinstance(op, Create)]
    assert operations == [Shutdown(failure=failure, cancel=cancel)]
    assert search.is_over
    assert search.progress() == 1.0


def test_trials_are_shown_in_the_order_of_creation() -> None:
    search, ids = _begin()
    search.apply(Progressed(request_id=ids[1], progress=0.5))
    search.apply(Exited(request_id=ids[2], reason=ExitReason.ERROR))
    shown = [(t.request_id, t.progress, t.exit_reason) for t in search.trials()]
    assert shown == [(ids[0], 0, None), (ids[1], 0.5, None), (ids[2], 1, ExitReason.ERROR)]


def test_snapshot_of_another_version_is_refused() -> None:
    snapshot = _begin()[0].snapshot() | {"version": 2}
    with pytest.raises(ValueError, match="must have version 1, but got 2"):
        Search.restore(CONFIG, {}, snapshot)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SingleConfig(metric="loss"), "`kind` is 'single', but got 'random'"),
        (RandomConfig(metric="loss", max_trials=4), "`max_trials` is 4, but got 3"),
    ],
)
def test_snapshot_of_another_configuration_is_refused(config: Any, message: str) -> None:
    snapshot = json.loads(json.dumps(_begin()[0].snapshot()))
    with pytest.raises(ValueError, match=message):
        Search.restore(config, {}, snapshot)


def test_snapshot_of_another_grid_or_bracket_is_refused(halving: Any) -> None:
    snapshot = Search(halving(), {}, 0).snapshot()
    with pytest.raises(ValueError, match=r"`rungs` is \[1, 2, 5\], but got \[1, 3, 9\]"):
        Search.restore(halving(max_time=5, divisor=2), {}, snapshot)
    space = {"a": {"type": "categorical", "vals": [1, 2]}}
    config = GridConfig(metric="loss")
    snapshot = Search(config, space, 0).snapshot()
    with pytest.raises(ValueError, match="`grid size` is 1, but got 2"):
        Search.restore(config, {}, snapshot)


def test_replay_refuses_inputs_of_another_search() -> None:
    with pytest.raises(ValueError, match="Hint: give `Started` first"):
        replay(CONFIG, {}, 0, [Reported(request_id="a", time=1, metric=1)])


def test_import_is_light() -> None:
    script = (
        "import sys, paceline.search\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'fastapi', 'sqlalchemy'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
