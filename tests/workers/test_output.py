"""Bytes to lines: ends, control sequences, ranks, levels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline._base.terminal_text import join_colors, split_colors
from paceline._training.workers.processes.worker_output import (
    LINE_CHARACTERS,
    LineSplitter,
    OutputLine,
    _LinePieceReader,
)


def _lines(data: bytes, **settings: object) -> list[OutputLine]:
    splitter = LineSplitter("stdout", **settings)  # type: ignore[arg-type]
    return splitter.feed(data, 1.0) + splitter.close(2.0)


def _texts(data: bytes) -> list[str]:
    return [line.text for line in _lines(data)]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"no end", ["no end"]),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07x\n", ["red x"]),
        (b"bell\x07 back\x08space nul\x00\ttab\n", ["bell backspace nul\ttab"]),
        (b"\xff\xfe caf\xc3\xa9\n", ["�� café"]),
        (b"half of a character \xc3", ["half of a character �"]),
        (b"\r 10%\r 99%\r100%\n", [" 99%", "100%"]),
        (b"10%\r20%\r30%\r", ["20%", "30%"]),
        (b"10%\r100%\r\ndone\n", ["10%", "100%", "done"]),
        (b"state\rcut off", ["state", "cut off"]),
    ],
)
def test_bytes_become_lines(data: bytes, texts: list[str]) -> None:
    assert _texts(data) == texts


@pytest.mark.parametrize(
    ("data", "text", "colors"),
    [
        (b"\x1b[31mred\x1b[0m \x1b[2Jx\n", "red x", ((0, "31"), (3, "0"))),
        (b"\x1b[32m[rank=2] ok\x1b[m\n", "ok", ((0, "32"), (2, ""))),
        (b"\x1b[38;5;9ma\x1b[38:2::1:2:3mb\n", "ab", ((0, "38;5;9"),)),
        (b"\x1b[1mb" * 201 + b"\n", "b" * 201, ()),
        (b"10%\r\x1b[33m20%\r", "20%", ((0, "33"),)),
    ],
)
def test_colours_are_kept_beside_the_plain_text(
    data: bytes, text: str, colors: tuple[tuple[int, str], ...]
) -> None:
    """Changes of colour keep their places; other sequences, and colours without end, are left."""
    line = _lines(data)[-1]
    assert (line.text, line.colors) == (text, colors)
    assert split_colors(join_colors(text, colors))[0] == text


def test_a_carriage_return_at_the_end_of_a_read_is_part_of_the_next_line_end() -> None:
    splitter = LineSplitter("stdout")
    assert splitter.feed(b"one\r", 0.0) == []
    assert [line.text for line in splitter.feed(b"\ntwo\n", 0.1)] == ["one", "two"]


def test_states_of_a_progress_bar_come_through_twice_a_second_and_the_last_one_always() -> None:
    splitter = LineSplitter("stderr")
    seen = []
    for step in range(1000):
        now = step / 100
        seen += splitter.feed(b"%d%%\r" % step, now)
        seen += splitter.tick(now)
    assert 15 <= len(seen) <= 21
    assert splitter.due is not None
    assert [line.text for line in splitter.tick(splitter.due)] == ["998%"]
    assert splitter.due is None
    assert [line.text for line in splitter.close(20.0)] == ["999%"]


def test_a_line_that_is_too_long_is_cut_and_marked() -> None:
    long = "x" * (2 * LINE_CHARACTERS + 5)
    lines = _lines(f"ERROR: {long}\nshort\n".encode())
    assert [len(line.text) for line in lines] == [LINE_CHARACTERS, LINE_CHARACTERS, 12, 5]
    assert [line.is_continued for line in lines] == [True, True, False, False]
    assert [line.level for line in lines] == ["ERROR", "ERROR", "ERROR", None]
    assert "".join(line.text for line in lines[:3]) == f"ERROR: {long}"


def test_a_line_of_exactly_the_limit_is_not_cut() -> None:
    (line,) = _lines(b"y" * LINE_CHARACTERS + b"\n")
    assert (len(line.text), line.is_continued) == (LINE_CHARACTERS, False)


@pytest.mark.parametrize("offset", range(-6, 3))
def test_a_cut_never_splits_a_control_sequence(offset: int) -> None:
    before = b"a" * (LINE_CHARACTERS + offset)
    lines = _lines(before + b"\x1b[1;31m" + b"b" * 10 + b"\n")
    assert "".join(line.text for line in lines) == before.decode() + "b" * 10


@pytest.mark.parametrize(
    ("text", "rank", "level", "rest"),
    [
        ("[rank=3] hello", 3, None, "hello"),
        ("[rank=12] ERROR: no", 12, "ERROR", "ERROR: no"),
        ("[rank=0] ", 0, None, ""),
        ("[rank1]: ValueError: x", 1, None, "ValueError: x"),
        ("[rank=1] [rank1]: text", 1, None, "text"),
        ("[ranked] text", None, None, "[ranked] text"),
        ("INFO: [77] root: text", None, "INFO", "INFO: [77] root: text"),
        ("WARNING:root:text", None, "WARNING", "WARNING:root:text"),
        ("WARN text", None, "WARNING", "WARN text"),
        ("[ERROR] text", None, "ERROR", "[ERROR] text"),
        ("CRITICAL", None, "CRITICAL", "CRITICAL"),
        ("ERRORS: 3", None, None, "ERRORS: 3"),
        ("info: text", None, None, "info: text"),
    ],
)
def test_rank_and_level_are_found(
    text: str, rank: int | None, level: str | None, rest: str
) -> None:
    (line,) = _lines(f"{text}\n".encode())
    assert (line.rank, line.level, line.text) == (rank, level, rest)


def test_a_worker_of_a_launcher_cannot_speak_for_another_rank() -> None:
    (line,) = _lines(b"[rank=3] text\n", rank=0)
    assert (line.rank, line.text) == (0, "[rank=3] text")


TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>

ValueError: y"""


def test_tracebacks_are_errors_up_to_the_exception() -> None:
    lines = _lines(f"before\n{TRACEBACK}\nafter\n".encode())
    levels = {line.text: line.level for line in lines if line.text}
    assert levels.pop("before") is None
    assert levels.pop("after") is None
    assert set(levels.values()) == {"ERROR"}


def test_tracebacks_of_two_ranks_may_alternate_line_by_line() -> None:
    tracebacks = TRACEBACK.splitlines()[:4]
    mixed = [f"[rank={rank}] {text}" for text in tracebacks for rank in (0, 1)]
    lines = _lines("\n".join([*mixed, "[rank=0] on", "[rank=1] on"]).encode())
    assert [line.level for line in lines] == ["ERROR"] * 8 + [None, None]


def test_an_exception_group_is_an_error_as_a_whole() -> None:
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "a.py", line 1, in <module>\n'
        "  | ExceptionGroup: two (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | ValueError: a\n"
        "    +------------------------------------\n"
        "after\n"
    )
    assert [line.level for line in _lines(text.encode())] == ["ERROR"] * 6 + [None]


_BYTES = st.lists(
    st.sampled_from(
        [b"a", b"\n", b"\r", b"\xc3", b"\xa9", b"\x1b[31m", b"\x1b", b"[", b"]0;", b"1"]
    ),
    max_size=60,
).map(b"".join)


def _chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@given(data=_BYTES, cuts=st.lists(st.integers(0, 200)), limit=st.integers(5, 20))
def test_pieces_do_not_depend_on_how_the_bytes_arrive(
    data: bytes, cuts: list[int], limit: int
) -> None:
    whole = _LinePieceReader(limit)
    chunked = _LinePieceReader(limit)
    expected = [*whole.feed(data), *whole.close()]
    pieces = [piece for chunk in _chunks(data, cuts) for piece in chunked.feed(chunk)]
    assert [*pieces, *chunked.close()] == expected


@given(data=_BYTES.filter(lambda data: b"\r" not in data), cuts=st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    splitter = LineSplitter("stdout")
    lines = [line for chunk in _chunks(data, cuts) for line in splitter.feed(chunk, 1.0)]
    assert lines + splitter.close(2.0) == _lines(data)


TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
STACK = f"""\
Current thread 0x00007f9ae8c54b80 (most recent call first):
  File "{TORCH}", line 3252 in all_reduce
  File "{TORCH}", line 83 in wrapper
  File "/home/me/train.py", line 9 in train_func
  File "{paceline.__path__[0]}/train/_worker_jobs.py", line 299 in call
  File "/home/me/train.py", line 4 in <module>
  File "/usr/lib/python3.11/runpy.py", line 8 in run
"""


def test_a_stack_has_its_newest_frame_and_those_of_the_user_first() -> None:
    lines = STACK.splitlines()
    shown = [*lines[:2], lines[3], lines[5], "  ... 3 frames of torch and paceline and python"]
    assert _texts(STACK.encode() + b"next\n") == [*shown, "next"]
    # At its end nothing may come any more.
    splitter = LineSplitter("stderr", 1)
    assert [line.text for line in splitter.feed(STACK.encode(), 1.0)] == lines[:1]
    assert splitter.due == 1.5
    assert splitter.tick(1.4) == []
    assert [line.text for line in splitter.tick(1.5)] == shown[1:]
    assert splitter.due is None


def test_stacks_of_ranks_that_alternate_are_folded_for_each() -> None:
    text = "".join(f"[rank={rank}] {line}\n" for line in STACK.splitlines() for rank in (0, 1))
    for rank in (0, 1):
        told = [line.text for line in _lines(text.encode()) if line.rank == rank]
        assert told[3:] == [
            STACK.splitlines()[5],
            "  ... 3 frames of torch and paceline and python",
        ]


def test_frames_that_are_no_stack_of_a_hang_are_left_as_they_are() -> None:
    frames = STACK.splitlines()[1:]
    assert _texts("\n".join(frames).encode()) == frames


def test_a_script_that_prints_frames_without_end_fills_no_memory() -> None:
    splitter = LineSplitter("stdout")
    frames = b'  File "train.py", line 1 in f\n' * 1000
    shown = splitter.feed(b"Thread 1 (most recent call first):\n" + frames, 1.0)
    assert len(shown) == 1001
