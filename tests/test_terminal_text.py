"""What a terminal is given of the texts of others."""

import io
import json

import pytest

from paceline._base.terminal_text import TerminalStream, escape_in_json, terminal_text


@pytest.mark.parametrize(
    "unsafe",
    ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\x85", "\r", "\x7f", "\x00", "\u202e", "\u2066",
     "\u2028", "\u061c", "\udc80"],
)  # fmt: skip
def test_no_character_that_changes_a_terminal_is_left(unsafe: str) -> None:
    shown = terminal_text(f"a{unsafe}b\n\tc")
    assert len(shown) == len(unsafe) + 5
    assert shown.replace("\n\t", "").isprintable()
    assert shown.endswith("b\n\tc")


@pytest.mark.parametrize("text", ["plain\n\ttext", "café 模型 🚲 ﷽", "نص עברית", "👩‍🚀"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert terminal_text(text) == text


def test_json_keeps_its_value() -> None:
    value = {"na\u202eme\x9b": ["\x1b[2J", "é\n", "\udc80"]}
    document = json.dumps(value, ensure_ascii=False, indent=1)
    assert terminal_text(escape_in_json(document)) == escape_in_json(document)
    assert json.loads(escape_in_json(document)) == value


def test_a_stream_lets_no_such_text_through() -> None:
    raw = io.StringIO()
    stream = TerminalStream(raw)
    print("a\x1b[2Jb\r", file=stream)
    stream.writelines(["\u202ec"])
    assert raw.getvalue() == "a [2Jb \n c"
    assert not stream.isatty()
