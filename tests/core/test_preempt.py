import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline._base.run_directory import Control
from paceline.journal import AttemptFinished, PreemptionAcknowledged, RunDirectory


def outcome(records: list[Any]) -> str:
    (finished,) = [record for record in records if isinstance(record, AttemptFinished)]
    return str(finished.outcome)


def test_nothing_preempts_by_itself(records_of: Callable[..., Any]) -> None:
    with core.init() as context:
        assert not context.preempt.should_preempt()
    assert outcome(records_of(context.run_dir)) == "completed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_preempts_and_is_acknowledged_once(
    number: signal.Signals, records_of: Callable[..., Any]
) -> None:
    with core.init() as context:
        assert not context.preempt.should_preempt()
        os.kill(os.getpid(), number)
        assert context.preempt.should_preempt()
        assert context.preempt.should_preempt()
    assert len(records_of(context.run_dir, PreemptionAcknowledged)) == 1
    assert outcome(records_of(context.run_dir)) == "preempted"


def test_control_file_preempts(cluster_run: Callable[..., RunDirectory]) -> None:
    run = cluster_run()
    with core.init() as context:
        assert not context.preempt.should_preempt()
        run.write_control(Control(operation_length=3))
        assert not context.preempt.should_preempt()
        run.write_control(Control(should_preempt=True))
        assert context.preempt.should_preempt()
        run.write_control(Control())
        assert context.preempt.should_preempt()


@pytest.mark.parametrize("mode", core.PreemptMode)
def test_every_mode_hears_of_a_signal_and_of_the_runner(
    mode: core.PreemptMode, cluster_run: Callable[..., RunDirectory], records_of: Callable[..., Any]
) -> None:
    run = cluster_run()
    with core.init(preempt_mode=mode) as context:
        assert not context.preempt.should_preempt()
        if mode is core.PreemptMode.ChiefOnly:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            run.write_control(Control(should_preempt=True))
        assert context.preempt.should_preempt()
    assert outcome(records_of(run.path)) == "preempted"


def test_preemption_without_acknowledgement_counts_as_completed(
    cluster_run: Callable[..., RunDirectory], records_of: Callable[..., Any]
) -> None:
    run = cluster_run()
    run.write_control(Control(should_preempt=True))
    with core.init() as context:
        assert context.preempt.should_preempt(auto_ack=False)
    assert records_of(run.path, PreemptionAcknowledged) == []
    assert outcome(records_of(run.path)) == "completed"


def test_acknowledgement_by_hand_counts_as_preempted(
    cluster_run: Callable[..., RunDirectory], records_of: Callable[..., Any]
) -> None:
    run = cluster_run()
    with core.init() as context:
        with pytest.raises(RuntimeError, match="`should_preempt\\(\\)` has returned True"):
            context.preempt.acknowledge_preemption_signal()
        run.write_control(Control(should_preempt=True))
        assert context.preempt.should_preempt(auto_ack=False)
        context.preempt.acknowledge_preemption_signal()
        context.preempt.acknowledge_preemption_signal()
    assert len(records_of(run.path, PreemptionAcknowledged)) == 1
    assert outcome(records_of(run.path)) == "preempted"


@pytest.fixture
def own_handler() -> Iterator[list[int]]:
    """Install a SIGTERM handler of the user's, and yield the signals that it has got."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, previous)


def test_handlers_are_installed_late_chained_and_restored(own_handler: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with core.init() as context:
        assert signal.getsignal(signal.SIGTERM) is before
        context.preempt.should_preempt()
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
        assert own_handler == [signal.SIGTERM]
        assert context.preempt.should_preempt()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_comes_again_ends_no_process_that_a_runner_looks_after() -> None:
    code = """
        import os, signal
        from paceline.core._preemption_and_search import SignalWatch

        watch = SignalWatch(is_supervised=True)
        watch.install()
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert watch.has_come
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=120)
    assert done.returncode == 0


def test_handler_that_the_user_sets_later_is_left_alone() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with core.init() as context:
        context.preempt.should_preempt()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, previous)


def test_call_outside_the_main_thread_warns_and_leaves_signals_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with core.init() as context:
        thread = threading.Thread(target=context.preempt.should_preempt)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is before
    assert "outside the main thread" in caplog.text


def test_first_interrupt_preempts_and_a_second_one_raises(
    records_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with core.init() as context:
        context.preempt.watch_signals(interrupt=True)
        assert not context.preempt.is_wanted()
        signal.raise_signal(signal.SIGINT)
        assert context.preempt.is_interrupted
        assert context.preempt.should_preempt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "press Ctrl-C again to leave now" in caplog.text
    assert outcome(records_of(context.run_dir)) == "preempted"


def test_interrupt_is_given_back_and_other_signals_stay_watched() -> None:
    before = signal.getsignal(signal.SIGINT)
    with core.init() as context:
        context.preempt.watch_signals(interrupt=True)
        assert signal.getsignal(signal.SIGINT) is not before
        context.preempt.release_interrupt()
        context.preempt.release_interrupt()
        assert signal.getsignal(signal.SIGINT) is before
        signal.raise_signal(signal.SIGTERM)
        assert context.preempt.should_preempt()
        assert not context.preempt.is_interrupted


def test_interrupt_after_another_signal_raises() -> None:
    with core.init() as context:
        context.preempt.watch_signals(interrupt=True)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_interrupt_handler_of_the_user_stays() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with core.init() as context:
            context.preempt.watch_signals(interrupt=True)
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
            assert not context.preempt.is_wanted()
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 0)])
def test_forked_child_dies_by_a_termination_and_outlives_an_interrupt(
    number: signal.Signals, code: int
) -> None:
    with core.init() as context:
        context.preempt.watch_signals(interrupt=True)
        pid = os.fork()
        if pid == 0:
            signal.raise_signal(number)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == code
        assert not context.preempt.is_wanted()


SLOW_SCRIPT = """
import sys, time
from paceline import core
with core.init() as context:
    if sys.argv[1] == "asks":
        context.preempt.should_preempt()
    print("ready", flush=True)
    while not (sys.argv[1] == "asks" and context.preempt.should_preempt()):
        time.sleep(0.01)
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
        print("storing", flush=True)
        if sys.argv[2:] == ["slowly"]:
            time.sleep(60)
"""


@pytest.fixture
def start_script(
    tmp_path: Path, clean_environment: dict[str, str]
) -> Callable[..., "subprocess.Popen[str]"]:
    """Return a function that starts the slow script and waits until it is ready."""

    def start(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW_SCRIPT, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    return start


def test_first_signal_leads_to_a_clean_exit(start_script: Callable[..., Any]) -> None:
    process = start_script("asks")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=240)
    assert process.returncode == 0
    (summary,) = core.list_runs(Path("paceline_runs"))
    assert summary.state is core.RunState.PREEMPTED
    assert summary.latest_checkpoint is not None


def test_second_signal_kills_while_a_checkpoint_is_stored(
    start_script: Callable[..., Any],
) -> None:
    process = start_script("asks", "slowly")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "storing\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGTERM
    (summary,) = core.list_runs(Path("paceline_runs"))
    assert summary.state is core.RunState.CRASHED
    assert summary.latest_checkpoint is None


def test_script_that_never_asks_dies_by_the_signal(start_script: Callable[..., Any]) -> None:
    process = start_script("never")
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGTERM
