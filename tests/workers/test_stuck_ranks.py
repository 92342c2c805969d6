"""The judgement whether ranks wait in vain."""

import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._training.workers.pickled_calls import PackedCall
from paceline._training.workers.serve_calls import WorkerError
from paceline._training.workers.stuck_ranks import (
    DetectedHang,
    Progress,
    ProgressMeter,
    WatchedRank,
    detect_hang,
)
from paceline._training.workers.worker_failures import WorkerExit
from paceline._training.workers.worker_health import (
    Assignment,
    FailureDetector,
    PoolSettings,
    PoolWorker,
    worker_observations,
)
from paceline._training.workers.worker_pools import PendingCall

CERTAIN_S, TIMEOUT_S = 5.0, 100.0


def seen(rank: int, text: str) -> WatchedRank:
    """Return an observation for a text such as "waits 6 s in all_reduce 4"."""
    words = text.split()
    state, count = words[0], int(words[-1])
    if state != "waits":
        place = f"data.py:{rank} in {words[2]}" if words[1] == "in" else ""
        return WatchedRank(rank, state == "returned", Progress(num_collectives=count, place=place))
    return WatchedRank(
        rank,
        False,
        Progress(
            stuck_s=float(words[1]),
            is_waiting=True,
            operation="" if words[4] == "nothing" else words[4],
            num_collectives=count,
            place=f"train.py:{rank} in main",
        ),
    )


def judged(*texts: str) -> DetectedHang | None:
    return detect_hang([seen(rank, text) for rank, text in enumerate(texts)], CERTAIN_S, TIMEOUT_S)


@pytest.mark.parametrize(
    ("texts", "said", "rank", "is_certain"),
    [
        (
            ["waits 6 s in all_reduce 5", "returned 4"],
            "Rank 0 waits in `all_reduce` (train.py:0 in main) for 6 s, but rank 1 has returned"
            " without. Missing ranks: 1.",
            1,
            True,
        ),
        (
            ["returned 4", "waits 6 s in barrier 5", "returned 3", "waits 7 s in barrier 5"],
            "Ranks 1 and 3 wait in `barrier` (train.py:1 in main) for 6 s, but ranks 0 and 2 have"
            " returned without. Missing ranks: 0, 2.",
            0,
            True,
        ),
        (
            ["waits 6 s in all_reduce 5", "waits 8 s in barrier 5"],
            "Rank 0 waits in `all_reduce` (train.py:0 in main) and rank 1 waits in `barrier`"
            " (train.py:1 in main) for 6 s, but these must be the same.",
            0,
            True,
        ),
        (
            ["waits 6 s in distributed.gather 4", "waits 8 s in all_reduce 5"],
            "Rank 0 waits in `distributed.gather` (train.py:0 in main) and rank 1 waits in"
            " `all_reduce` (train.py:1 in main) for 6 s, but these must be the same.",
            0,
            True,
        ),
        (
            ["returned 4", "waits 6 s in distributed.gather 4", "returned 4"],
            "Rank 1 waits in `distributed.gather` (train.py:1 in main) for 6 s, but ranks 0 and 2"
            " have returned without. Missing ranks: 0, 2.",
            0,
            True,
        ),
        (
            ["waits 101 s in all_reduce 5", "computes 4", "computes 4"],
            "Rank 0 waits in `all_reduce` (train.py:0 in main) for 101 s, but ranks 1 and 2 have"
            " not come there. Missing ranks: 1, 2.",
            1,
            False,
        ),
        (
            ["waits 101 s in all_reduce 5", "waits 102 s in all_reduce 5"],
            "Ranks 0 and 1 wait in `all_reduce` (train.py:0 in main) for 101 s, but none of them"
            " goes on.",
            0,
            False,
        ),
        (
            ["waits 101 s in init_process_group -1", "returned -1"],
            "Rank 0 waits in `init_process_group` (train.py:0 in main) for 101 s, but none of them"
            " goes on.",
            0,
            False,
        ),
    ],
)
def test_who_waits_in_vain_is_named(
    texts: list[str], said: str, rank: int, is_certain: bool
) -> None:
    assert judged(*texts) == DetectedHang(said, rank, is_certain)


@pytest.mark.parametrize(
    "texts",
    [
        # The chief evaluates, or another rank computes.
        ["computes 4", "waits 999 s in distributed.broadcast 4"],
        ["waits 9 s in distributed.gather 4", "waits 9 s in all_reduce 5", "computes 4"],
        # The store names these itself.
        ["waits 9 s in distributed.gather 4", "waits 9 s in distributed.allgather 4"],
        # Not for long yet.
        ["waits 4 s in all_reduce 5", "returned 4"],
        ["waits 99 s in all_reduce 5", "computes 4"],
        ["waits 99 s in all_reduce 5", "waits 99 s in all_reduce 5"],
        # The others may still do it.
        ["waits 99 s in all_reduce 5", "computes 4", "computes 5"],
        ["waits 101 s in broadcast 5", "computes 5"],
        # A rank that has made as many may go on alone.
        ["waits 99 s in nothing 5", "returned 5"],
        ["waits 999 s in nothing 5", "returned 4"],
        # Pairs of ranks are no concern of the others.
        ["waits 99 s in recv 9", "computes 7", "returned 3"],
        ["waits 99 s in send 3", "waits 99 s in recv 3"],
        # There is nobody to wait for.
        ["waits 999 s in barrier 5"],
        ["returned 5", "returned 4"],
    ],
)
def test_who_waits_with_reason_is_left_alone(texts: list[str]) -> None:
    assert judged(*texts) is None


PROGRESS = st.builds(
    Progress,
    stuck_s=st.floats(0, 200),
    is_waiting=st.booleans(),
    operation=st.sampled_from(["", "all_reduce", "barrier", "recv", "backward"]),
    num_collectives=st.integers(-1, 3),
    place=st.just("train.py:1 in main"),
)


@given(st.lists(st.tuples(st.booleans(), PROGRESS), min_size=1, max_size=5))
def test_a_verdict_needs_a_rank_that_waits_and_patience_changes_no_certain_one(
    parts: list[tuple[bool, Any]],
) -> None:
    observations = [WatchedRank(rank, *part) for rank, part in enumerate(parts)]
    verdict = detect_hang(observations, CERTAIN_S, TIMEOUT_S)
    if verdict is None:
        # Nor would less patience for the uncertain ones make one certain.
        sooner = detect_hang(observations, CERTAIN_S, CERTAIN_S)
        assert sooner is None or not sooner.is_certain
        return
    waiting = [o for o in observations if o.progress.is_waiting and o.progress.stuck_s >= CERTAIN_S]
    assert any(not o.has_returned and o.progress.operation for o in waiting)
    assert 0 <= verdict.rank < len(observations)
    if verdict.is_certain:
        assert detect_hang(observations, CERTAIN_S, 1e9) == verdict


def test_a_rank_that_has_just_returned_may_have_been_where_others_wait() -> None:
    """What it told last was before that; only what it tells afterwards counts."""
    with ExitStack() as stack:
        workers = []
        for rank in range(2):
            ends = socket.socketpair()
            for end in ends:
                stack.callback(end.close)
            workers.append(PoolWorker(rank, ends[0]))
        call = PendingCall(1, range(2))
        for worker in workers:
            worker.assign(Assignment(call, PackedCall(b"")))
        waits = Progress(6.0, True, "barrier", num_collectives=1, place="train.py:1 in main")
        workers[0].progress, workers[1].progress = waits, Progress(num_collectives=0)
        workers[1].take_value(b"")
        assert detect_hang(worker_observations(call, workers), CERTAIN_S, TIMEOUT_S) is None
        workers[1].progress = Progress(num_collectives=1)
        assert detect_hang(worker_observations(call, workers), CERTAIN_S, TIMEOUT_S) is None
        workers[1].progress = Progress(num_collectives=0)
        verdict = detect_hang(worker_observations(call, workers), CERTAIN_S, TIMEOUT_S)
        assert verdict is not None
        assert verdict.is_certain


def test_code_that_waits_in_pythons_library_is_named_by_the_users_line() -> None:
    leave = threading.Event()

    def wait_for_it() -> None:
        leave.wait()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    try:
        while sys._current_frames()[thread.ident].f_code.co_filename != threading.__file__:  # type: ignore[index]
            time.sleep(0.001)
        place = ProgressMeter(thread).measure().place
    finally:
        leave.set()
        thread.join()
    assert re.fullmatch(r"test_stuck_ranks\.py:\d+ in wait_for_it", place)


def refuse_descriptors(name: str) -> int:
    raise OSError(errno.EMFILE, name)


def test_progress_is_read_without_frame_objects_of_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Python ended with a segmentation fault where they were followed while torch compiled.
    monkeypatch.delattr(sys, "_current_frames")
    leave, entered = threading.Event(), threading.Event()

    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
        entered.set()
        leave.wait()

    thread = threading.Thread(target=descend, args=(150,))
    thread.start()
    try:
        entered.wait()
        meter = ProgressMeter(thread)
        assert re.fullmatch(r"test_stuck_ranks\.py:\d+ in descend", meter.measure().place)
        monkeypatch.setattr(os, "memfd_create", refuse_descriptors, raising=False)
        assert meter.measure() == Progress()
    finally:
        leave.set()
        thread.join()


def test_the_stack_of_the_maker_is_the_same_as_among_all_threads() -> None:
    places: list[str] = []

    def look(own: ProgressMeter, among_all: ProgressMeter) -> None:
        # The maker may go from one line to the next between two looks.
        while not places or places[0] != places[2]:
            places[:] = [meter.measure().place for meter in (own, among_all, own)]

    meters = ProgressMeter(), ProgressMeter(threading.current_thread())
    looker = threading.Thread(target=look, args=meters)
    looker.start()
    looker.join()
    assert places[0] == places[1]
    assert re.fullmatch(r"test_stuck_ranks\.py:\d+ in test_the_stack_of_.*", places[0])


# Threads of C++ get their Python state without the GIL, at their first call of Python.
LOOK_WHILE_THREADS_BEGIN = """
import ctypes, threading, time
from paceline._training.workers.stuck_ranks import ProgressMeter

system = ctypes.CDLL(None)
body = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
is_over = threading.Event()
def begin_threads():
    while not is_over.is_set():
        threads = [ctypes.c_ulong() for _ in range(8)]
        for thread in threads:
            system.pthread_create(ctypes.byref(thread), None, body, None)
        for thread in threads:
            system.pthread_join(thread, None)
places = set()
def look(meter):
    try:
        for _ in range(3000):
            places.add(meter.measure().place.partition(" in ")[2])
    finally:
        is_over.set()
beginners = [threading.Thread(target=begin_threads) for _ in range(2)]
looker = threading.Thread(target=look, args=(ProgressMeter(),))
for thread in [*beginners, looker]:
    thread.start()
for thread in [looker, *beginners]:
    thread.join()
# The main thread waits in `join`, or is between two lines.
assert places == {"<module>"}, places
"""


@pytest.mark.skipif(sys.platform != "linux", reason="begins threads by Linux' own function")
def test_progress_is_read_while_threads_of_other_languages_begin() -> None:
    # Python 3.11 ended with a segmentation fault in a moment.
    subprocess.run([sys.executable, "-c", LOOK_WHILE_THREADS_BEGIN], check=True)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(), "has told nothing of itself"),
        (Progress(0.0, False, place="train.py:1 in f"), "has been at train.py:1 in f for 0 s"),
        (Progress(6.0, True, place="train.py:1 in f"), "has waited for 6 s, at train.py:1 in f"),
        (
            Progress(6.0, False, "barrier", place="train.py:1 in f"),
            "has been in `barrier` for 6 s, at train.py:1 in f",
        ),
    ],
)
def test_what_a_worker_is_at_is_one_phrase(progress: Progress, text: str) -> None:
    assert progress.describe() == text


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_others_wait_for_is_told_with_its_place(late: int) -> None:
    texts = ["waits 101 s in all_reduce 5"] * 3
    texts[late] = "computes in load 4"
    hang = judged(*texts)
    assert hang is not None
    end = f"Missing ranks: {late}. Rank {late} is at data.py:{late} in load."
    assert hang.text.endswith(end)


def test_the_places_of_three_missing_ranks_are_told_at_most() -> None:
    hang = judged("waits 101 s in all_reduce 5", *["computes in load 4"] * 5)
    assert hang is not None
    assert hang.text.count(" is at ") == 3


@pytest.fixture
def three_workers() -> Iterator[list[PoolWorker]]:
    """Yield three workers that carry out one call."""
    call = PendingCall(1, range(3))
    with ExitStack() as stack:
        workers = []
        for rank in range(3):
            ends = socket.socketpair()
            for end in ends:
                stack.enter_context(end)
            workers.append(PoolWorker(rank, ends[0]))
            workers[-1].run_program(call)
            workers[-1].is_ready = True
        yield workers


_SETTINGS = PoolSettings(heartbeat_timeout_s=60.0, collective_timeout_s=1800.0, grace_s=2.0)


@pytest.mark.parametrize("sign", ["closed", "silent"])
@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_worker_is_named_although_its_end_is_told_late(
    three_workers: list[PoolWorker], killed: int, sign: str
) -> None:
    detector = FailureDetector(three_workers, _SETTINGS, lambda rank: False)
    broken = WorkerError(RuntimeError("broken"), "", "RuntimeError: broken", True, None)
    assert detector.note_error(three_workers[1], broken, 0.0) is None
    if sign == "closed":
        three_workers[killed].channel.close()
    for second in range(1, 9):
        for worker in three_workers:
            if worker.rank != killed:
                worker.silent_s = 0.0
        assert detector.look(second, 0.0 if sign == "closed" else 1.0) is None
        assert detector.due is not None
        assert second < detector.due <= second + 2.0
    end = detector.note_exit(
        three_workers[killed], WorkerExit(rank=killed, code=137, signal=9), 9.0
    )
    assert end is not None
    assert f"Rank {killed} was ended by SIGKILL" in str(end.error)


@pytest.mark.parametrize(
    ("others", "told_after_s"), [("at work", 15.0), ("unheard", 15.0), ("have returned", 2.0)]
)
def test_a_broken_connection_is_told_once_no_worker_can_be_its_cause(
    three_workers: list[PoolWorker], others: str, told_after_s: float
) -> None:
    if others != "at work":
        for rank in (0, 2):
            three_workers[rank].current = None
    if others == "unheard":
        three_workers[2].channel.close()
    broken = WorkerError(RuntimeError("broken"), "", "RuntimeError: broken", True, None)
    detector = FailureDetector(three_workers, _SETTINGS, lambda rank: False)
    assert detector.note_error(three_workers[1], broken, 0.0) is None
    assert detector.look(told_after_s - 0.1, 0.0) is None
    end = detector.look(told_after_s, 0.0)
    assert end is not None
    assert str(end.error) == "broken"


@pytest.mark.parametrize("late", [0, 2])
def test_a_long_wait_is_noticed_now_and_then_before_it_ends_the_workers(
    three_workers: list[PoolWorker], late: int
) -> None:
    settings = _SETTINGS._replace(heartbeat_timeout_s=30.0)
    detector = FailureDetector(three_workers, settings, lambda rank: False)

    def noticed(seconds: int, count: int = 5) -> list[int]:
        """Return after how many seconds of a wait something was said."""
        said = []
        for second in range(seconds):
            texts = [f"waits {second} s in all_reduce {count}"] * 3
            texts[late] = f"computes in load {count - 1}"
            for rank, text in enumerate(texts):
                three_workers[rank].progress = seen(rank, text).progress
            assert detector.look(second, 0.0) is None
            notice = detector.notice()
            if notice is not None:
                assert f"Missing ranks: {late}. Rank {late} is at data.py:{late}" in notice
                assert notice.endswith("The workers are ended if that lasts 1800 s.")
                said.append(second)
        return said

    assert noticed(1800) == [60, 240, 960]
    # What went on and waits again is noticed as early.
    assert noticed(100, count=6) == [60]


def test_all_that_wait_are_named_once_one_has_waited_too_long() -> None:
    texts = "waits 101 s in all_reduce 5", "waits 99 s in all_reduce 5", "computes in load 4"
    hang = judged(*texts)
    assert hang is not None
    assert hang.text.startswith("Ranks 0 and 1 wait in `all_reduce` (train.py:0 in main) for 99 s")
