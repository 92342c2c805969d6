import threading
import time
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch

from paceline import core
from paceline._base.run_directory import Control
from paceline.journal import OperationCompleted, OperationsRequested, ProgressReported, RunDirectory


def test_off_cluster_there_is_one_operation_of_length_one(records_of: Callable[..., Any]) -> None:
    with core.init() as context:
        lengths = []
        for operation in context.searcher.operations():
            operation.report_progress(0.5)
            operation.report_completed(torch.tensor(nan))
            lengths.append(operation.length)
        assert list(context.searcher.operations()) == []
    assert lengths == [1]
    assert len(records_of(context.run_dir, OperationsRequested)) == 1
    assert [r.progress for r in records_of(context.run_dir, ProgressReported)] == [0.5]
    (completed,) = records_of(context.run_dir, OperationCompleted)
    assert (completed.length, completed.metric) == (1, {"$float": "nan"})


@pytest.mark.parametrize(
    ("searcher", "length"),
    [
        ({"max_length": 8}, 8),
        ({"max_length": {"epochs": 5}}, 5),
        ({"max_time": 7, "time_metric": "batches"}, 7),
        ({}, 1),
    ],
)
def test_without_a_master_the_config_gives_the_length(
    cluster_run: Callable[..., RunDirectory], searcher: dict[str, Any], length: int
) -> None:
    cluster_run(config={"searcher": searcher}, cluster_id="")
    with core.init() as context:
        (operation,) = list_completed(context)
    assert operation.length == length


def list_completed(context: core.Context) -> list[core.SearcherOperation]:
    operations = []
    for operation in context.searcher.operations():
        operation.report_completed(0.1)
        operations.append(operation)
    return operations


def test_on_a_cluster_operations_follow_the_control_file(
    cluster_run: Callable[..., RunDirectory], records_of: Callable[..., Any]
) -> None:
    run = cluster_run(config={"searcher": {"max_time": 16}})

    def act_as_runner() -> None:
        for length in (4, 16):
            run.write_control(Control(operation_length=length))
            while len(records_of(run.path, OperationCompleted)) < (1 if length == 4 else 2):
                time.sleep(0.01)
        run.write_control(Control(operation_length=16, operations_closed=True))

    runner = threading.Thread(target=act_as_runner)
    runner.start()
    with core.init() as context:
        lengths = []
        for operation in context.searcher.operations():
            operation.report_progress(operation.length)
            operation.report_completed(1)
            lengths.append(operation.length)
    runner.join()
    assert lengths == [4, 16]
    assert [r.progress for r in records_of(run.path, ProgressReported)] == [0.25, 1.0]


def test_waiting_for_an_operation_ends_with_a_preemption(
    cluster_run: Callable[..., RunDirectory],
) -> None:
    run = cluster_run()
    timer = threading.Timer(0.1, run.write_control, [Control(should_preempt=True)])
    timer.start()
    with core.init() as context:
        assert list(context.searcher.operations()) == []
        assert context.preempt.should_preempt()
    timer.join()


def test_operation_must_be_completed_before_the_next() -> None:
    with core.init() as context:
        operations = context.searcher.operations()
        next(operations)
        with pytest.raises(RuntimeError, match="length 1 is not. Hint: call `report_completed"):
            next(operations)


def test_completed_operation_takes_no_further_report() -> None:
    with core.init() as context:
        operation = next(context.searcher.operations())
        operation.report_completed(1.0)
        assert operation.is_completed
        with pytest.raises(RuntimeError, match="`report_completed` must come before"):
            operation.report_completed(1.0)
        with pytest.raises(RuntimeError, match="`report_progress` must come before"):
            operation.report_progress(1.0)


@pytest.mark.parametrize("metric", ["text", True, [1.0], {"a": 1}, None])
def test_metric_that_is_no_number_is_refused(metric: Any) -> None:
    with core.init() as context:
        operation = next(context.searcher.operations())
        with pytest.raises(TypeError, match="must be a number"):
            operation.report_completed(metric)


@pytest.mark.parametrize("length", [-1, 1.5, nan])
def test_operation_progress_out_of_range_is_refused(length: float) -> None:
    with core.init() as context:
        operation = next(context.searcher.operations())
        with pytest.raises(ValueError, match="from 0 to 1 inclusive"):
            operation.report_progress(length)
