"""The comparison of searches, with one seed, and the measurement of their speed, small."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def modules_of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.long
def test_all_methods_are_compared_on_networks(tmp_path: Path) -> None:
    import search_quality
    from search_tasks import tasks

    task = next(tasks())
    methods = set(search_quality.methods(task))
    slow = {"SMAC", "Ray Tune ASHA", *(name for name in methods if "tpe" in name.lower())}
    path = tmp_path / "results.jsonl"
    rows = search_quality.results_of([task], 1, path, without=slow - {"Optuna TPE"})
    assert {row["method"] for row in rows} == methods - slow | {"Optuna TPE"}
    for row in rows:
        assert row["regrets"] == sorted(row["regrets"], reverse=True)
        assert 0 <= row["regrets"][-1] < 1
        assert 0.5 < row["used"] <= 1
    # What the file has is not computed again.
    assert search_quality.results_of([task], 1, path, without=methods) == [
        json.loads(line) for line in path.read_text().splitlines()
    ]
    assert "| adaptive_asha |" in search_quality.table(rows)


def test_a_search_of_ours_asks_the_sampler() -> None:
    import search_quality
    from search_tasks import tasks

    task = next(tasks())
    runs = [search_quality.run(task, f"random{end}", 3)["regrets"] for end in ("", ", tpe")]
    assert runs[0] != runs[1]


@pytest.mark.long
def test_the_speed_of_a_search_is_measured() -> None:
    import search_speed

    figures = [*search_speed.decisions(200), *search_speed.asks(20)]
    assert len(figures) == 4
