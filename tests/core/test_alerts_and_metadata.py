"""What a training says to people: alerts, and metadata of the run."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from paceline import core
from paceline.core._read_runs import read_alerts
from paceline.journal import RunDirectory, RunMetadataSet


def test_alerts_are_recorded_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), core.init() as context:
        context.alert("Loss is high", "It was 9.", level="warn")
        context.alert(description="only this")
        for number in range(20):
            context.alert(f"number {number}", level="debug")
    alerts = read_alerts(RunDirectory(context.run_dir))
    assert [alert.title for alert in alerts] == [f"number {number}" for number in range(20)]
    told = [(record.levelname, record.message) for record in caplog.records]
    assert ("WARNING", "Alert of rank 0: Loss is high: It was 9.") in told
    assert ("INFO", "Alert of rank 0: only this") in told


def test_a_trial_leaves_its_alerts_to_the_log_of_its_master(
    cluster_run: Callable[..., RunDirectory], caplog: pytest.LogCaptureFixture
) -> None:
    run = cluster_run()
    with core.init() as context:
        context.alert("Loss is high", level="error")
    assert [alert.level for alert in read_alerts(run)] == ["error"]
    assert "Loss is high" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "must have a `title` or a `description`"),
        ({"title": 3}, TypeError, "`title` must be a string, but got 3"),
        ({"title": "x" * 201}, ValueError, "`title` must have 200 characters at most, but has 201"),
        ({"title": "x", "level": "fatal"}, ValueError, "`level` must be one of debug, info, warn"),
    ],
)
def test_wrong_alerts_are_refused(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with core.init() as context, pytest.raises(error, match=match):
        context.alert(**arguments)


def test_metadata_is_replaced_and_kept_for_later_attempts(records_of: Callable[..., Any]) -> None:
    with core.init(name="said") as context:
        assert context.train.get_metadata() == {}
        context.train.set_metadata({"data": "v1", "sizes": (1, 2)})
        context.train.get_metadata()["data"] = "changed"
        assert context.train.get_metadata() == {"data": "v1", "sizes": [1, 2]}
        for metadata, error, match in (
            ({"x": {1}}, TypeError, "`metadata` must be JSON-able"),
            ([1], TypeError, "`metadata` must be a dictionary"),
            (
                {"x": "y" * 65536},
                ValueError,
                "must have 65536 bytes as JSON at most, but has 65544",
            ),
        ):
            with pytest.raises(error, match=match):
                context.train.set_metadata(metadata)  # type: ignore[arg-type]
        context.preempt.settle()
    with core.init(name="said", resume="auto") as context:
        assert context.train.get_metadata() == {"data": "v1", "sizes": [1, 2]}
        context.train.set_metadata({})
        assert context.train.get_metadata() == {}
    assert [record.metadata for record in records_of(context.run_dir, RunMetadataSet)] == [
        {"data": "v1", "sizes": [1, 2]}, {},
    ]  # fmt: skip


def test_a_trial_is_told_what_earlier_attempts_have_set(
    cluster_run: Callable[..., RunDirectory],
) -> None:
    cluster_run(metadata={"data": "v1"})
    with core.init() as context:
        assert context.train.get_metadata() == {"data": "v1"}
