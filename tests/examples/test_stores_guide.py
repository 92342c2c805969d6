"""What the guide to object stores shows runs with a bucket."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guides import ROOT, Guide, line_trial
from safetensors.torch import load_file

from paceline import core, pytorch
from paceline.storage import ObjectStorage
from paceline.storage._uploads import UploadLimits

GUIDE = Guide("docs/stores.md")
SCRIPT = f"""{line_trial()}
with pytorch.init({{"global_batch_size": 32, "lr": 0.1}}) as context:
    result = pytorch.Trainer(LineTrial(context), context).fit(max_length=pytorch.Epoch(2))
print(result.checkpoint_urls[-1])
"""


@pytest.mark.long
def test_a_run_keeps_its_checkpoints_in_the_bucket(
    s3: str,
    run_with_torch: Callable[..., Any],
    run_command: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    [variable, url] = re.findall(r"^(\w+)=(\S+) python train.py$", GUIDE.blocks("sh")[0], re.M)[0]
    assert url == "s3://my-bucket/runs"
    first = run_with_torch(SCRIPT, name="train.py", **{variable: f"{s3}/runs"})
    assert first.returncode == 0, first.stderr
    [run] = core.list_runs(tmp_path / "paceline_runs")
    checkpoint = f"{s3}/runs/{run.path.name}/{run.latest_checkpoint}"
    assert first.stdout.split()[-1] == checkpoint

    assert "`PACELINE_RESUME=url`" in GUIDE.text
    longer = SCRIPT.replace("Epoch(2)", "Epoch(3)")
    second = run_with_torch(longer, name="train.py", PACELINE_RESUME=checkpoint)
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith(f"{s3}/runs/{run.path.name}/")

    for command in ("download url", "export url FILE"):
        assert f"`paceline checkpoint {command}`" in GUIDE.text
        run_command(f"paceline checkpoint {command.replace('url', checkpoint)}")
    downloaded = pytorch.load_weights_from_checkpoint_path(
        tmp_path / "checkpoints" / str(run.latest_checkpoint)
    )
    assert downloaded.keys() == load_file("FILE").keys()


def test_time_limits_are_listed() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", GUIDE.text, re.MULTILINE)
    assert UploadLimits.from_environment({}) == tuple(float(seconds) for _, seconds in rows)
    assert UploadLimits.from_environment({name: "7" for name, _ in rows}) == (7.0, 7.0, 7.0)


def test_a_storage_has_the_members_that_are_listed() -> None:
    table = GUIDE.text.partition("| What you write |")[2]
    members = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    assert set(members) == ObjectStorage.__abstractmethods__ | {"from_url", "is_remote"}


def test_the_entry_point_is_that_of_the_example() -> None:
    example = (ROOT / "examples" / "plugins" / "pyproject.toml").read_text()
    assert [line for line in GUIDE.blocks("toml")[0].splitlines() if line not in example] == []
