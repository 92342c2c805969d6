"""What the guide to hyperparameter search shows runs."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "tune.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
FIRST_OF_TUNE = next(n for n, block in enumerate(BLOCKS) if "from ray import tune" in block)


def test_the_search_without_ray_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    for number, block in enumerate(BLOCKS[:FIRST_OF_TUNE]):
        exec(compile(block, f"docs/tune.md, block {number}", "exec"), names)
    assert "4 trial(s), best loss" in capsys.readouterr().out
    assert len(names["results"]) == 2
    assert (tmp_path / "paceline_runs" / "my-search" / "trials" / "0002" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_code_for_ray_tune_runs(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    # Importing it here would change variables of this process.
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED: needs pip install 'ray[tune]'")

    code = "\n".join([BLOCKS[0], *BLOCKS[FIRST_OF_TUNE:]])
    code = code.replace(
        "from ray import tune",
        "import ray\nfrom ray import tune\nray.init('local', num_cpus=4, include_dashboard=False)",
        1,
    )
    (tmp_path / "guide.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**clean_environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "{'lr': 0.1" in done.stdout
