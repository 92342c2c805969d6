import threading
from collections import Counter
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import core
from paceline._base.run_directory import Control
from paceline.journal import (
    EarlyExitReported,
    MetricsReported,
    ProgressReported,
    RunDirectory,
    StatusReported,
)


def all_records(path: Path) -> list[Any]:
    run = RunDirectory(path)
    return [entry.decode() for key in run.journal_keys() for entry in run.reader(key)]


def rows(path: Path) -> list[tuple[str, int, dict[str, Any]]]:
    return [
        (record.group, record.steps_completed, record.metrics)
        for record in all_records(path)
        if isinstance(record, MetricsReported)
    ]


def test_reports_stand_in_the_journal_in_order() -> None:
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": torch.tensor(0.5)})
        context.train.report_validation_metrics(1, {"acc": np.float64(0.25)})
        context.train.report_metrics("mine", 0, {"text": "a", "nested": {"b": [True]}})
    assert rows(context.run_dir) == [
        ("training", 1, {"loss": 0.5}),
        ("validation", 1, {"acc": 0.25}),
        ("mine", 0, {"text": "a", "nested": {"b": [True]}}),
    ]


@pytest.mark.parametrize("later_steps", [[], [5, 6]], ids=["at the last step", "at an older step"])
def test_same_values_again_pass_and_new_names_are_added(later_steps: list[int]) -> None:
    with core.init() as context:
        report = context.train.report_training_metrics
        report(4, {"loss": nan, "list": [1, nan]})
        for step in later_steps:
            report(step, {"loss": 1.0})
        report(4, {"loss": nan})
        report(4, {"list": [1, nan], "lr": 0.1})
        report(4, {"lr": 0.1, "loss": nan})
        with pytest.raises(
            ValueError, match=r"training metric 'lr' at `steps_completed`=4 was 0.1 and is now 0.2"
        ):
            report(4, {"lr": 0.2, "other": 3})
    at_four = [metrics for _, step, metrics in rows(context.run_dir) if step == 4]
    assert at_four == [{"loss": {"$float": "nan"}, "list": [1, {"$float": "nan"}]}, {"lr": 0.1}]


def test_step_below_the_last_that_was_never_reported_is_accepted() -> None:
    with core.init() as context:
        context.train.report_training_metrics(5, {"loss": 1.0})
        context.train.report_training_metrics(3, {"loss": 2.0})
        with pytest.raises(ValueError, match="was 2.0 and is now 2.5"):
            context.train.report_training_metrics(3, {"loss": 2.5})
    assert [step for _, step, _ in rows(context.run_dir)] == [5, 3]


def test_empty_report_is_written_once() -> None:
    with core.init() as context:
        context.train.report_training_metrics(1, {})
        context.train.report_training_metrics(1, {})
    assert rows(context.run_dir) == [("training", 1, {})]


def test_same_step_in_another_group_is_another_row() -> None:
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        context.train.report_validation_metrics(1, {"loss": 2.0})
    assert len(rows(context.run_dir)) == 2


@pytest.mark.parametrize("steps", [0, 3, np.int64(3), torch.tensor(3), 10**15])
def test_steps_may_be_any_integer(steps: Any) -> None:
    with core.init() as context:
        context.train.report_training_metrics(steps, {"loss": 1.0})
    assert rows(context.run_dir) == [("training", int(steps), {"loss": 1.0})]


@pytest.mark.parametrize(
    ("steps", "error", "match"),
    [
        (-1, ValueError, "at least 0, but got -1"),
        (1.0, TypeError, r"must be an integer, but got 1.0 \(float\)"),
        (True, TypeError, "must be an integer, but got True"),
        ("3", TypeError, "must be an integer, but got '3'"),
        (None, TypeError, "must be an integer, but got None"),
    ],
)
def test_other_steps_are_refused(steps: Any, error: type[Exception], match: str) -> None:
    with core.init() as context, pytest.raises(error, match=match):
        context.train.report_training_metrics(steps, {"loss": 1.0})


@pytest.mark.parametrize(
    ("group", "error"),
    [("", ValueError), ("a.b", ValueError), ("gpu", ValueError), (3, TypeError)],
)
def test_unusable_group_is_refused(group: Any, error: type[Exception]) -> None:
    with core.init() as context, pytest.raises(error, match="`group` must be"):
        context.train.report_metrics(group, 1, {"loss": 1.0})


def test_missing_value_is_refused() -> None:
    with core.init() as context, pytest.raises(TypeError, match="`loss` must be.*got None"):
        context.train.report_training_metrics(1, {"loss": None})


def test_progress_status_and_early_exit_are_recorded(records_of: Callable[..., Any]) -> None:
    with core.init() as context:
        context.train.report_progress(0.5)
        context.train.set_status("warming up")
        context.train.report_early_exit(core.EarlyExitReason.USER_REQUESTED_STOP)
        context.train.report_early_exit("user_requested_stop")
    read = records_of
    assert [r.progress for r in read(context.run_dir, ProgressReported)] == [0.5]
    assert [r.status for r in read(context.run_dir, StatusReported)] == ["warming up"]
    assert [r.reason for r in read(context.run_dir, EarlyExitReported)] == ["user_requested_stop"]


def test_a_long_status_is_cut(records_of: Callable[..., Any]) -> None:
    with core.init() as context:
        context.train.set_status("x" * 70_000)
    [status] = records_of(context.run_dir, StatusReported)
    assert status.status == "x" * 65_536


@pytest.mark.parametrize("progress", [-0.1, 1.1, nan])
def test_progress_out_of_range_is_refused(progress: float) -> None:
    with core.init() as context, pytest.raises(ValueError, match="from 0 to 1 inclusive"):
        context.train.report_progress(progress)


def test_wrong_early_exit_reason_and_status_are_refused() -> None:
    with core.init() as context:
        with pytest.raises(ValueError, match="tired"):
            context.train.report_early_exit("tired")
        with pytest.raises(TypeError, match="`status` must be a string, but got 3"):
            context.train.set_status(3)  # type: ignore[arg-type]


def test_best_validation_is_none_without_a_searched_metric() -> None:
    with core.init() as context:
        context.train.report_validation_metrics(1, {"loss": 1.0})
        assert context.train.get_experiment_best_validation() is None


@pytest.mark.parametrize(
    ("is_smaller_better", "told", "expected"),
    [
        (True, None, 1.0),
        (False, None, 3.0),
        (True, 0.5, 0.5),
        (True, 2.0, 1.0),
        (False, 2.0, 3.0),
        (False, {"$float": "inf"}, float("inf")),
    ],
)
def test_best_validation_is_the_better_of_ours_and_the_runners(
    cluster_run: Callable[..., RunDirectory], is_smaller_better: bool, told: Any, expected: float
) -> None:
    searcher = {"metric": "loss", "smaller_is_better": is_smaller_better}
    run = cluster_run(config={"searcher": searcher})
    with core.init() as context:
        assert context.train.get_experiment_best_validation() is None
        context.train.report_validation_metrics(1, {"loss": 3.0})
        context.train.report_metrics("validation", 2, {"loss": 1.0})
        for step, value in enumerate((nan, float("inf"), float("-inf")), 3):
            context.train.report_validation_metrics(step, {"loss": value})
        run.write_control(Control(best_validation=told))
        assert context.train.get_experiment_best_validation() == expected


@pytest.mark.parametrize("value", ["low", True, np.bool_(False), [1.0]])
def test_a_searched_metric_that_is_no_number_is_refused_by_name(
    cluster_run: Callable[..., RunDirectory], value: Any
) -> None:
    cluster_run(config={"searcher": {"name": "random", "metric": "loss"}})
    with core.init() as context:
        with pytest.raises(TypeError, match=r"'loss' must be a number.*Hint: report a float"):
            context.train.report_validation_metrics(1, {"loss": value, "accuracy": 1.0})
        # Other groups and names may have anything.
        context.train.report_training_metrics(1, {"loss": "low"})
        context.train.report_validation_metrics(1, {"state": "good", "loss": nan})


def test_a_single_trial_may_report_anything(cluster_run: Callable[..., RunDirectory]) -> None:
    cluster_run(config={"searcher": {"name": "single", "metric": "loss"}})
    with core.init() as context:
        context.train.report_validation_metrics(1, {"loss": "low"})


@pytest.mark.parametrize("steps", [2**63, np.uint64(2**63), 2**100])
def test_a_step_that_no_database_holds_is_refused(steps: Any) -> None:
    with core.init() as context:
        with pytest.raises(ValueError, match=r"`steps_completed` must be below 2\*\*63, but got"):
            context.train.report_training_metrics(steps, {"loss": 1.0})
        context.train.report_training_metrics(2**63 - 1, {"loss": 1.0})
    assert rows(context.run_dir) == [("training", 2**63 - 1, {"loss": 1.0})]


def test_reports_of_threads_are_all_there(
    cluster_run: Callable[..., RunDirectory], often_switching_threads: None
) -> None:
    searcher = {"metric": "loss", "smaller_is_better": True}
    run = cluster_run(config={"searcher": searcher})
    num_threads, num_each = 8, 25
    begin, errors = threading.Barrier(num_threads), []

    def report(train: core.TrainContext, name: int) -> None:
        try:
            begin.wait()
            for index in range(num_each):
                step = index * num_threads + name
                train.report_metrics(f"own_{name}", index, {"index": index})
                train.report_metrics("same_step", 0, {f"{name}_{index}": index})
                train.report_training_metrics(step, {"loss": -step})
                train.report_validation_metrics(step, {"loss": -step})
                train.report_progress(index / num_each)
                train.set_status(f"{name}_{index}")
            train.report_early_exit("user_requested_stop")
        except BaseException as error:
            errors.append(error)

    with core.init() as context:
        arguments = [(context.train, name) for name in range(num_threads)]
        threads = [threading.Thread(target=report, args=given) for given in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert context.train.get_experiment_best_validation() == 1 - num_threads * num_each
    assert errors == []
    found = rows(run.path)
    for name in range(num_threads):
        own = [step for group, step, _ in found if group == f"own_{name}"]
        assert own == list(range(num_each))
    for group in ("training", "validation"):
        steps = [step for found_group, step, _ in found if found_group == group]
        assert sorted(steps) == list(range(num_threads * num_each))
    merged = [metrics for group, _, metrics in found if group == "same_step"]
    assert len(merged) == len({name for metrics in merged for name in metrics}) == 200
    kinds = Counter(type(record) for record in all_records(run.path))
    assert kinds[ProgressReported] == kinds[StatusReported] == num_threads * num_each
    assert kinds[EarlyExitReported] == 1
