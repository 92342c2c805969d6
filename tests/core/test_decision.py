"""What a training process waits for after a report that a search judges, and what it does not."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline import core
from paceline._base.run_directory import Control
from paceline.journal import MetricsReported, RunDirectory

SEARCHER = {"searcher": {"name": "async_halving", "metric": "loss"}}
JUDGED = ["loss", "epochs"]
WHOLE = {"loss": 1.0, "epochs": 2}
# Records of one journal: the first one says that the attempt has begun.
FIRST_REPORT = 1


@pytest.fixture
def judged_run(cluster_run: Callable[..., RunDirectory]) -> RunDirectory:
    """Return the run directory of a trial whose search judges two metrics."""
    return cluster_run(config=SEARCHER, judged_metrics=JUDGED)


def answer(run: RunDirectory, records_of: Callable[..., Any], *answers: Control) -> None:
    """Be the runner: answer once each report is in the journal."""
    for number, control in enumerate(answers, 1):
        while len(records_of(run.path, MetricsReported)) < number:
            time.sleep(0.01)
        # Time enough for a script that does not wait to ask and leave.
        time.sleep(0.2)
        run.write_control(control)


@pytest.fixture
def start_answering(
    judged_run: RunDirectory, records_of: Callable[..., Any]
) -> Callable[..., threading.Thread]:
    """Return a function that starts a runner's part in a thread."""

    def start(*answers: Control) -> threading.Thread:
        thread = threading.Thread(target=answer, args=(judged_run, records_of, *answers))
        thread.start()
        return thread

    return start


def test_the_first_question_after_a_report_waits_for_the_decision_on_it(
    start_answering: Callable[..., threading.Thread], caplog: pytest.LogCaptureFixture
) -> None:
    """An answer to the first report is none to the second, whose decision is to stop."""
    runner = start_answering(
        Control(judged=(0, FIRST_REPORT)),
        Control(judged=(0, FIRST_REPORT + 1), should_preempt=True),
    )
    with core.init() as context:
        for epoch in (1, 2):
            context.train.report_validation_metrics(epoch, {"loss": 1.0, "epochs": epoch})
            assert context.preempt.should_preempt() == (epoch == 2)
    runner.join()
    assert not caplog.records


def test_an_answer_to_an_earlier_generation_is_none(
    judged_run: RunDirectory, start_answering: Callable[..., threading.Thread]
) -> None:
    with core.init():
        pass
    judged_run.write_control(Control(judged=(0, 100)))
    runner = start_answering(Control(judged=(1, FIRST_REPORT), should_preempt=True))
    with core.init() as context:
        context.train.report_validation_metrics(1, WHOLE)
        assert context.preempt.should_preempt()
    runner.join()


def test_a_report_in_two_parts_is_judged_when_it_is_whole(
    start_answering: Callable[..., threading.Thread],
) -> None:
    runner = start_answering(
        Control(judged=(0, FIRST_REPORT)),
        Control(judged=(0, FIRST_REPORT + 1), should_preempt=True),
    )
    with core.init() as context:
        context.train.report_metrics("validation", 3, {"loss": float("nan")})
        assert not context.preempt.should_preempt()
        context.train.report_validation_metrics(3, {"epochs": 1})
        assert context.preempt.should_preempt()
    runner.join()


@pytest.mark.parametrize(
    "report",
    [
        lambda train: train.report_training_metrics(1, WHOLE),
        lambda train: train.report_metrics("mine", 1, WHOLE),
        lambda train: train.report_validation_metrics(1, {"loss": 1.0}),
    ],
    ids=["training", "own group", "part"],
)
def test_what_is_not_judged_is_not_waited_for(
    judged_run: RunDirectory, report: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    with core.init() as context:
        report(context.train)
        assert not context.preempt.should_preempt()
    assert not caplog.records


def test_nothing_is_waited_for_without_a_search_that_stops_trials(
    cluster_run: Callable[..., RunDirectory], caplog: pytest.LogCaptureFixture
) -> None:
    """The runs are one without a master, and one whose search stops no trial."""
    for begin in (lambda: None, cluster_run):
        begin()
        with core.init() as context:
            context.train.report_validation_metrics(1, WHOLE)
            assert not context.preempt.should_preempt()
    assert not caplog.records


def test_reports_of_a_trial_that_works_by_operations_are_not_waited_for(
    judged_run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    judged_run.write_control(Control(operation_length=1))
    with core.init() as context:
        for operation in context.searcher.operations():
            context.train.report_validation_metrics(1, WHOLE)
            assert not context.preempt.should_preempt()
            operation.report_completed(1.0)
            judged_run.write_control(Control(operation_length=1, operations_closed=True))
    assert not caplog.records


def test_a_signal_ends_the_waiting(
    judged_run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with core.init() as context:
        assert not context.preempt.should_preempt()
        context.train.report_validation_metrics(1, WHOLE)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert context.preempt.should_preempt()
        timer.join()
    assert not caplog.records


@pytest.mark.long
def test_a_runner_that_says_nothing_is_waited_for_once_until_it_does(
    judged_run: RunDirectory,
    start_answering: Callable[..., threading.Thread],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with core.init() as context:
        for epoch in (1, 2, 3):
            context.train.report_validation_metrics(epoch, {"loss": 1.0, "epochs": epoch})
            assert not context.preempt.should_preempt()
        (warning,) = caplog.records
        assert "validation at step 1 has not come within 10 s" in warning.getMessage()
        judged_run.write_control(Control(judged=(0, FIRST_REPORT)))
        stop = Control(judged=(0, FIRST_REPORT + 3), should_preempt=True)
        runner = start_answering(*[Control(judged=(0, FIRST_REPORT))] * 3, stop)
        context.train.report_validation_metrics(4, WHOLE)
        assert context.preempt.should_preempt()
    runner.join()
    assert len(caplog.records) == 1


RANKS = """
import time
from paceline import core
from paceline._base.run_directory import Control
from paceline.journal import RunDirectory

with core.init() as context:
    rank = context.distributed.rank
    for epoch in (1, 2):
        if rank == 0:
            context.train.report_validation_metrics(epoch, {"loss": 1.0, "epochs": epoch})
        if rank == 2:
            time.sleep(0.2)
            judged = Control(judged=(0, epoch), should_preempt=epoch == 2)
            RunDirectory(context.run_dir).write_control(judged)
        print(context.preempt.should_preempt(), flush=True)
"""


@pytest.mark.long
def test_all_ranks_take_the_decision_that_the_chief_waits_for(
    judged_run: RunDirectory,
    start_ranks: Callable[..., Any],
    finish_ranks: Callable[..., list[tuple[int, str, str]]],
) -> None:
    """Rank 2 is the one that answers, late, so that the chief has to wait for it."""
    results = finish_ranks(start_ranks(RANKS, PACELINE_RUN_DIR=str(judged_run.path)))
    assert [(status, output) for status, output, _ in results] == [(0, "False\nTrue\n")] * 3
