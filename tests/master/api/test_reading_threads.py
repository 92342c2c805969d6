"""Which thread answers a read."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.api import readers as _readers
from paceline._cluster.master.api.readers import Readers


def slow(make: Callable[[], Any]) -> Any:
    """The function of one route."""
    return make()


def quick(make: Callable[[], Any]) -> Any:
    """The function of another one."""
    return make()


Route = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Readers]:
    """Return what answers reads in this process."""
    made = Readers(tmp_path / "none", num_cores=1)
    yield made
    made.close()


async def answer(readers: Readers, route: Route, make: Callable[[], object]) -> str:
    """Return the body of an answer."""
    return bytes((await readers.answer(route, {"make": make})).body).decode()


def run_beside(readers: Readers, held: Route, other: Route) -> str:
    """Answer for a route while an answer for another one is held up; return the thread's name."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert go_on.wait(60)

    async def run() -> str:
        first = asyncio.create_task(answer(readers, held, hold))
        await asyncio.to_thread(is_held.wait)
        try:
            name = answer(readers, other, lambda: threading.current_thread().name)
            return await asyncio.wait_for(name, 60)
        finally:
            go_on.set()
            await first

    return asyncio.run(run())


def most_at_once(readers: Readers) -> int:
    """Return how many of 20 quick reads ran at once."""
    running: list[int] = []
    most = 0

    def read() -> None:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        time.sleep(0.001)
        running.pop()

    async def run() -> None:
        await asyncio.gather(*(answer(readers, quick, read) for _ in range(20)))

    asyncio.run(run())
    return most


def test_a_slow_route_holds_up_no_quick_one(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_readers, "_SLOW_S", 0.01)
    asyncio.run(answer(readers, slow, lambda: time.sleep(0.02)))
    assert run_beside(readers, slow, quick).startswith('"paceline-reader')
    # Of slow ones some run at a time.
    assert run_beside(readers, slow, slow).startswith('"paceline-slow-reader')


def test_a_read_that_takes_long_for_the_first_time_holds_up_no_other(readers: Readers) -> None:
    assert run_beside(readers, slow, quick).startswith('"paceline-reader')
    assert most_at_once(readers) == 1


def test_a_slow_read_that_fails_makes_its_route_slow_too(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        time.sleep(0.02)
        raise ZeroDivisionError

    monkeypatch.setattr(_readers, "_SLOW_S", 0.01)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(answer(readers, slow, fail))
    assert run_beside(readers, slow, quick).startswith('"paceline-reader')


def test_a_route_is_slow_for_a_while_only(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_readers, "_SLOW_S", 0.01)
    monkeypatch.setattr(_readers, "_SLOW_FOR_S", 0.0)
    asyncio.run(answer(readers, slow, lambda: time.sleep(0.02)))
    name = asyncio.run(answer(readers, slow, lambda: threading.current_thread().name))
    assert name.startswith('"paceline-reader')


def test_a_route_that_turns_out_to_be_slow_leaves_the_line(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that waited before anybody knew do not hold up quick ones."""
    monkeypatch.setattr(_readers, "_SLOW_S", 0.05)

    def take_long() -> str:
        time.sleep(0.1)
        return threading.current_thread().name

    async def run() -> list[str]:
        return await asyncio.gather(*(answer(readers, slow, take_long) for _ in range(4)))

    names = asyncio.run(run())
    assert [name.startswith('"paceline-slow-reader') for name in names] == [False, True, True, True]


def test_quick_reads_take_turns(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_readers, "_SLOW_S", math.inf)

    assert most_at_once(readers) == 1
