"""What the guide to the trainer shows runs, and what it lists is all there is."""

import re
from pathlib import Path

import pytest
import yaml

from paceline import pytorch
from paceline.config import validate_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "pytorch.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"docs/pytorch.md, block {number}", "exec"), names)


def test_the_config_is_valid() -> None:
    config = validate_config(yaml.safe_load(blocks("yaml")[0]))
    assert not config.warnings


def test_every_hook_is_listed() -> None:
    table = GUIDE.partition("## Callbacks")[2].partition("## Piece by piece")[0]
    listed = set(re.findall(r"`(\w+)\([\w, ]*\)`", table))
    assert listed == {name for name in vars(pytorch.PyTorchCallback) if not name.startswith("__")}
    assert len(listed) == 17


def test_every_mode_of_a_scheduler_is_listed() -> None:
    for mode in pytorch.LRScheduler.StepMode:
        assert f"| `{mode.name}` |" in GUIDE


def test_links_lead_to_files_and_headings() -> None:
    headings = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", GUIDE, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        path, _, anchor = target.partition("#")
        assert (DOCS / path).exists() if path else anchor in headings, target
