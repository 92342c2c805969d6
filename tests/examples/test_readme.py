"""What the README shows works."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.config import validate_config
from paceline.core import list_runs, read_metrics
from paceline.journal import RunDirectory

ROOT = Path(__file__).resolve().parents[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_trainer_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is that of the guide."""
    guide = (ROOT / "docs" / "pytorch.md").read_text()
    code = guide.partition("```python\n")[2].partition("HPARAMS =")[0]
    (tmp_path / "model_def.py").write_text(f"{code}\nMyTrial = LineTrial\n")
    (tmp_path / "train.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path("train.py")
    sys.modules.pop("model_def")
    [run] = list_runs(tmp_path / "paceline_runs")
    rows = list(read_metrics(RunDirectory(run.path), "validation"))
    assert [row.steps_completed for row in rows] == list(range(10, 101, 10))
    assert rows[-1].metrics["validation_loss"] < rows[0].metrics["validation_loss"]


def test_the_script_trains(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[1])
    subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True, timeout=100
    )
    [run] = list_runs(tmp_path / "paceline_runs")
    rows = list(read_metrics(RunDirectory(run.path), "validation"))
    assert [row.steps_completed for row in rows] == list(range(10, 101, 10))
    assert rows[-1].metrics["loss"] < rows[0].metrics["loss"]
    assert run.latest_checkpoint is not None


def test_the_config_is_valid() -> None:
    config = validate_config(yaml.safe_load(blocks("yaml")[0]))
    assert config.searcher.metric == "loss"


def test_links_lead_to_files() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (ROOT / target).exists(), target


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
