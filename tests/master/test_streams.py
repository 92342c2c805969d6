"""Streams of interactive tasks in the master's memory: order, bounds, repeats, ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline._cluster.master import streams as module
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.streams import Pipe, StreamOverError, Streams
from paceline._cluster.messages.runner_messages import MAX_STREAM_BYTES

PIECE = b"x" * MAX_STREAM_BYTES


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


def test_bytes_arrive_in_order_and_once() -> None:
    async def work() -> None:
        pipe = Pipe()
        assert await pipe.write(0, b"abc", 0) == 3
        # As after an answer that was lost.
        assert await pipe.write(0, b"abc", 0) == 3
        assert await pipe.write(1, b"bcdef", 0) == 6
        assert await pipe.read(0, 0) == b"abcdef"
        assert await pipe.read(0, 0) == b"abcdef"
        assert await pipe.read(4, 0) == b"ef"
        assert await pipe.read(6, 0) == b""

    run(work)


@pytest.mark.parametrize("offset", [1, 5])
def test_gap_between_pieces_is_refused(offset: int) -> None:
    async def work() -> None:
        pipe = Pipe()
        with pytest.raises(RefusedError, match="at most 0"):
            await pipe.write(offset, b"abc", 0)

    run(work)


def test_bytes_that_were_dropped_are_not_given_again() -> None:
    async def work() -> None:
        pipe = Pipe()
        await pipe.write(0, b"abcd", 0)
        await pipe.read(2, 0)
        for offset in (1, 5):
            with pytest.raises(RefusedError, match="from 2 to 4"):
                await pipe.read(offset, 0)

    run(work)


def test_sender_waits_for_a_receiver_that_does_not_read() -> None:
    async def work() -> None:
        pipe = Pipe()
        assert await pipe.write(0, PIECE, 0) == len(PIECE)
        # Nothing more is kept than one piece; the sender is told to send it again.
        assert await pipe.write(len(PIECE), PIECE, 0.05) == len(PIECE)
        sender = asyncio.ensure_future(pipe.write(len(PIECE), PIECE, 30))
        await asyncio.sleep(0.05)
        assert not sender.done()
        await pipe.read(len(PIECE), 0)
        assert await sender == 2 * len(PIECE)

    run(work)


def test_rest_is_read_after_the_end() -> None:
    async def work() -> None:
        pipe = Pipe()
        await pipe.write(0, b"last", 0)
        reader = asyncio.ensure_future(pipe.read(4, 30))
        await asyncio.sleep(0.02)
        pipe.end()
        with pytest.raises(StreamOverError):
            await reader
        with pytest.raises(StreamOverError):
            await pipe.write(4, b"more", 0)
        assert pipe.is_over

    run(work)


def test_runner_hears_of_a_new_stream_at_once() -> None:
    async def work() -> None:
        streams = Streams()
        version, names = await streams.poll(7, "/", is_ready=True, after=-1, wait_s=30)
        assert names == []
        poll = streams.poll(7, "/", is_ready=True, after=version, wait_s=30)
        waiting = asyncio.ensure_future(poll)
        await asyncio.sleep(0.02)
        streams.opened("a", 1, 8, "ann")
        await asyncio.sleep(0.02)
        assert not waiting.done()
        streams.opened("b", 1, 7, "ann")
        assert (await waiting)[1] == ["b"]
        streams.close()

    run(work)


def test_link_waits_until_the_task_listens() -> None:
    async def work() -> None:
        streams = Streams()
        assert await streams.link(7, 0.01) is None
        waiting = asyncio.ensure_future(streams.link(7, 30))
        await streams.poll(7, "/lab", is_ready=False, after=-1, wait_s=0)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await streams.poll(7, "/lab", is_ready=True, after=-1, wait_s=0)
        assert await waiting == "/lab"

    run(work)


def test_streams_are_bounded_by_task_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STREAMS_PER_TASK", 3)
    monkeypatch.setattr(module, "_STREAMS_PER_USER", 5)

    async def work() -> None:
        streams = Streams()
        for number in range(3):
            streams.opened(f"a{number}", 1, 7, "ann")
        with pytest.raises(RefusedError, match="of the task .* at most 3"):
            streams.opened("a3", 1, 7, "ann")
        for number in range(2):
            streams.opened(f"b{number}", 2, 8, "ann")
        with pytest.raises(RefusedError, match="of the user .* at most 5"):
            streams.opened("b2", 2, 8, "ann")
        streams.opened("c", 3, 9, "bob")
        streams.drop("a0")
        streams.opened("b2", 2, 8, "ann")

    run(work)


def test_stream_without_a_sign_of_a_side_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        streams = Streams()
        left, kept = streams.opened("a", 1, 7, "ann"), streams.opened("b", 1, 7, "ann")
        await streams.poll(7, "/", is_ready=True, after=-1, wait_s=0)
        left.asked_at[module.TO_USER] -= module.SILENT_S + 1
        _, names = await streams.poll(7, "/", is_ready=True, after=-1, wait_s=0)
        assert names == ["b"]
        assert streams.find("b") is kept
        with pytest.raises(StreamOverError):
            await left.pipes[module.TO_TASK].read(0, 0)

    run(work)
