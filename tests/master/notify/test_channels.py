"""The file `notify.yaml`: what it takes, and what its errors do not show."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline._cluster.master.notify.notices import Channel, read_notify_file

HOOK = "https://ops.example.org/TOKEN123"


def write(path: Path, data: dict[str, Any]) -> Path:
    (path / "notify.yaml").write_text(yaml.safe_dump(data))
    return path / "notify.yaml"


def test_missing_file_has_no_channels(tmp_path: Path) -> None:
    assert read_notify_file(tmp_path / "notify.yaml").channels == {}


def test_file_of_the_page_is_valid(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "messages.md"
    blocks = re.findall(r"```yaml\n(channels:.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        if "slack" in block:
            pytest.importorskip("apprise")
        (tmp_path / "notify.yaml").write_text(block)
        assert read_notify_file(tmp_path / "notify.yaml").channels


@pytest.mark.parametrize(
    ("channel", "why"),
    [
        ({}, "must have a `url`, or a `webhook` with a `secret`"),
        ({"webhook": HOOK}, "must have a `url`, or a `webhook` with a `secret`"),
        ({"url": "slack://TOKEN123", "secret": "whsec_" + "a" * 32}, "must have a `url`"),
        ({"webhook": HOOK, "url": "slack://TOKEN123", "secret": "whsec_" + "a" * 32}, "must have"),
        ({"webhook": "ftp://TOKEN123/x", "secret": "whsec_" + "a" * 32}, "webhook: String should"),
        ({"webhook": HOOK, "secret": "SECRET456"}, "secret: String should match"),
        ({"webhook": HOOK, "secret": "whsec_" + "a" * 30}, "secret: String should match"),
        ({"webhook": HOOK, "secret": "whsec_" + "a" * 92}, "secret: String should match"),
        (
            {"webhook": HOOK, "secret": "whsec_" + "a" * 32, "pause": "soon"},
            "pause: must be a time",
        ),
        ({"webhook": HOOK, "secret": "whsec_" + "a" * 32, "x": "SECRET456"}, "x: Extra inputs"),
    ],
)
def test_wrong_channel_is_refused_without_its_values(
    tmp_path: Path, channel: dict[str, Any], why: str
) -> None:
    path = write(tmp_path, {"channels": {"team": channel}})
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        read_notify_file(path)
    assert str(path) in str(caught.value)
    assert "TOKEN123" not in str(caught.value)
    assert "SECRET456" not in str(caught.value)


def test_rule_for_an_unknown_channel_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"rules": [{"to": ["nobody"]}]})
    with pytest.raises(ValueError, match=r"must name channels .* got \[\"nobody\"\]"):
        read_notify_file(path)


def test_channel_shows_no_address() -> None:
    channel = Channel(webhook=HOOK, secret="whsec_" + "a" * 32)
    assert repr(channel) == "Channel(pause=60.0)"
    assert channel.hide(f"no route to {HOOK}") == "no route to https://***/***"
