"""Which thread answers a read."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.master.api import _reading_route
from paceline.master.api._reading_route import ReadingThreads


def run_beside(threads: ReadingThreads, held: str, other: str) -> str:
    """Answer for a route while an answer for another one is held up; return the thread's name."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert go_on.wait(60)

    async def run() -> str:
        first = asyncio.create_task(threads.answer(held, hold))
        await asyncio.to_thread(is_held.wait)
        try:
            answer = threads.answer(other, lambda: threading.current_thread().name)
            return await asyncio.wait_for(answer, 60)
        finally:
            go_on.set()
            await first

    return asyncio.run(run())


@pytest.fixture
def threads() -> Iterator[ReadingThreads]:
    made = ReadingThreads()
    yield made
    made.close()


def answer(threads: ReadingThreads, route: str, make: Callable[[], object]) -> object:
    return asyncio.run(threads.answer(route, make))


def test_a_slow_route_holds_up_no_quick_one(
    threads: ReadingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reading_route, "_SLOW_S", 0.01)
    answer(threads, "slow", lambda: time.sleep(0.02))
    assert run_beside(threads, "slow", "quick").startswith("paceline-reader")
    # Of slow ones some run at a time.
    assert run_beside(threads, "slow", "slow").startswith("paceline-slow-reader")


def test_a_slow_read_that_fails_makes_its_route_slow_too(
    threads: ReadingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        time.sleep(0.02)
        raise ZeroDivisionError

    monkeypatch.setattr(_reading_route, "_SLOW_S", 0.01)
    with pytest.raises(ZeroDivisionError):
        answer(threads, "slow", fail)
    assert run_beside(threads, "slow", "quick").startswith("paceline-reader")


def test_a_route_is_slow_for_a_while_only(
    threads: ReadingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reading_route, "_SLOW_S", 0.01)
    monkeypatch.setattr(_reading_route, "_SLOW_FOR_S", 0.0)
    answer(threads, "slow", lambda: time.sleep(0.02))
    name = answer(threads, "slow", lambda: threading.current_thread().name)
    assert str(name).startswith("paceline-reader")


def test_quick_reads_take_turns(threads: ReadingThreads) -> None:
    async def run() -> set[str]:
        answers = [
            threads.answer(number, lambda: threading.current_thread().name) for number in range(20)
        ]
        return set(await asyncio.gather(*answers))

    assert len(asyncio.run(run())) == 1
