"""What the README shows works; `test_blocks.py` runs its blocks as a reader does."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from guides import ROOT, Guide

from paceline import __version__
from paceline.core import list_runs, read_metrics
from paceline.journal import RunDirectory

README = Guide("README.md")


@pytest.mark.long
def test_the_script_trains(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(README.blocks("python")[0])
    subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True, timeout=100
    )
    [run] = list_runs(tmp_path / "paceline_runs")
    rows = list(read_metrics(RunDirectory(run.path), "validation"))
    assert [row.steps_completed for row in rows] == list(range(10, 101, 10))
    assert rows[-1].metrics["loss"] < rows[0].metrics["loss"]
    assert run.latest_checkpoint is not None


def test_the_readme_stays_short() -> None:
    assert len(README.text.splitlines()) < 160


def test_the_first_lines_show_what_it_is() -> None:
    first = README.text.splitlines()[:30]
    assert "```diff" in first
    assert any(line.startswith("![") for line in first)
    text = "\n".join(first)
    assert "**For** " in text
    assert "**Not for** " in text


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["authors"] == [{"name": "The Paceline developers"}]
