"""`paceline checkpoint export`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline import core
from paceline._training.engine.checkpoints.state_format import save_state
from paceline._training.engine.checkpoints.weight_exports import export_weights
from paceline.cli._app import app
from paceline.storage import CheckpointNotFoundError, DirectoryStorage

# One weight of -0.7, as a trainer stored it.
STORED = Path(__file__).with_name("one_weight")
SCRIPT = f"""
import paceline

with paceline.core.init() as context:
    context.train.report_validation_metrics(1, {{"loss": 0.5}})
    print(context.checkpoint.upload({str(STORED)!r}, {{"steps_completed": 1}}))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Return the directory of a run below `tmp_path`, and the UUIDs of its two checkpoints."""
    monkeypatch.chdir(tmp_path)
    with core.init(name="mine") as context:
        uuids = [context.checkpoint.upload(STORED, {"steps_completed": n}) for n in (1, 2)]
    return context.run_dir, uuids


def weight_in(path: Path) -> float:
    return float(load_file(path)["weight"])


@pytest.mark.long
def test_a_directory_is_exported_with_tied_weights_once_or_under_all_names(
    paceline: Any, tmp_path: Path
) -> None:
    directory = shutil.copytree(STORED, tmp_path / "copied")
    weight = torch.ones(2, 2)
    state = {"a": weight, "b": weight, "number": torch.tensor(3), "_extra_state": "text"}
    save_state(state, directory, "model_0")
    result = paceline("checkpoint", "export", "copied", "out.safetensors", cwd=tmp_path)
    assert result.stdout == "out.safetensors\n"
    assert "Left out, as they are no tensors: _extra_state" in result.stderr
    assert "Left out, as they are tied to others: b (as a)" in result.stderr
    exported = load_file(tmp_path / "out.safetensors")
    assert exported.keys() == {"a", "number"}
    assert torch.equal(exported["a"], weight)
    assert exported["number"] == 3
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "b": "a"}
    export_weights(directory, tmp_path / "each", repeat_tied=True)
    exported = load_file(tmp_path / "each")
    assert exported.keys() == {"a", "b", "number"}
    assert torch.equal(exported["a"], exported["b"])
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copied", "each", "out.safetensors"]


@pytest.mark.long
def test_a_checkpoint_of_a_run_is_found_by_its_directory_its_begin_or_as_the_latest(
    paceline: Any, tmp_path: Path, run: tuple[Path, list[str]]
) -> None:
    directory, uuids = run
    for number, arguments in enumerate(
        [
            (directory / "checkpoints" / uuids[0], "out0"),
            (uuids[1][:8], "out1"),
            ("latest", "out2", "--run", "last"),
        ]
    ):
        paceline("c", "export", *arguments, cwd=tmp_path)
        assert weight_in(tmp_path / f"out{number}") == pytest.approx(-0.7)


def test_damaged_files_are_not_exported(
    paceline: Any, tmp_path: Path, run: tuple[Path, list[str]]
) -> None:
    directory, uuids = run
    file = directory / "checkpoints" / uuids[0] / "training.json"
    file.chmod(0o600)
    file.write_text("{}")
    result = paceline("c", "export", uuids[0], "out", cwd=tmp_path, code=1)
    assert "'training.json' was altered" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_deleted_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = DirectoryStorage(tmp_path / "storage")
    with storage.store_path("a") as path:
        (path / "training.json").touch()
    storage.commit("a", {})
    problems = DirectoryStorage.problems

    def delete_and_look(self: DirectoryStorage, manifest: Any) -> dict[str, str]:
        self.delete("a")
        return problems(self, manifest)

    monkeypatch.setattr(DirectoryStorage, "problems", delete_and_look)
    result = CliRunner().invoke(
        app, ["checkpoint", "export", str(tmp_path / "storage" / "a"), str(tmp_path / "o")]
    )
    assert isinstance(result.exception, CheckpointNotFoundError)
    assert "it was deleted meanwhile" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "taken"), "`FILE` must be a new file, but 'taken' is there"),
        (("nowhere", "missing/out"), "`FILE` must lie in a directory"),
        (("nowhere", "out"), "'nowhere' is neither of the first two"),
        (("RUN", "out"), "is a run. Hint: paceline checkpoint export latest FILE --run"),
        (("ffff", "out", "--run", "last"), "'ffff' fits none"),
        (("home", "out"), "has no training.json"),
        (("s3://bucket", "out"), "'s3://bucket'. Hint: the URL of a checkpoint is that of"),
        (("file:///nowhere/a", "out"), "there is none. Hint: the URL of a checkpoint is"),
        (
            ("STORED", "out", "--model", "1"),
            "must be 0, as the checkpoint holds 1 of them, but got",
        ),
        (
            ("STORED", "out", "--key", "net"),
            "`key` must be left out for the checkpoint of a trainer",
        ),
        (("STORED", "out", "--format", "dcp", "--repeat-tied"), "need --format safetensors"),
        (("STORED", "out", "--optimizer", "0"), "needs --format dcp"),
        (("STORED", "taken", "--max-shard-size", "5GB"), "a directory with --max-shard-size"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    paceline: Any,
    tmp_path: Path,
    run: tuple[Path, list[str]],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "home").mkdir()
    places = {"RUN": str(run[0]), "STORED": str(STORED)}
    given = [places.get(argument, argument) for argument in arguments]
    result = paceline("c", "export", *given, cwd=tmp_path, code=1)
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_checkpoint_in_an_object_store_is_exported(
    s3: str, paceline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with core.init(name="mine", checkpoint_storage=s3) as context:
        uuid = context.checkpoint.upload(STORED, {"steps_completed": 1})
    paceline("c", "export", uuid[:8], "out", cwd=tmp_path)
    paceline("c", "export", "latest", "out.d", "--run", "last", "--format", "dcp", cwd=tmp_path)
    assert weight_in(tmp_path / "out") == pytest.approx(-0.7)


@pytest.mark.slow
def test_a_checkpoint_is_exported_as_a_directory_of_dcp_and_back(
    paceline: Any, tmp_path: Path
) -> None:
    result = paceline("c", "export", STORED, "out", "--format", "dcp", cwd=tmp_path)
    assert result.stdout == "out\n"
    assert result.stderr == ""
    paceline("c", "export", "out", "weights", cwd=tmp_path)
    assert weight_in(tmp_path / "weights") == pytest.approx(-0.7)
    result = paceline("c", "export", "out", "other", "--key", "app", cwd=tmp_path, code=1)
    assert "the names there begin with model" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_a_checkpoint_of_the_master_is_fetched(mastered: Any, code: Path, tmp_path: Path) -> None:
    (code / "train.py").write_text(SCRIPT)
    created = mastered("e", "create", "config.yaml", ".", "--json", cwd=code)
    experiment = json.loads(created.stdout)["id"]
    mastered("e", "wait", experiment)
    [checkpoint] = json.loads(mastered("c", "list", experiment, "--json").stdout)
    mastered("c", "export", checkpoint["uuid"], "out", cwd=tmp_path)
    assert weight_in(tmp_path / "out") == pytest.approx(-0.7)


@pytest.mark.long
def test_a_checkpoint_in_a_bucket_is_exported_and_downloaded_by_its_url(
    paceline: Any, tmp_path: Path, s3: str
) -> None:
    with core.init(name="mine", checkpoint_storage=s3) as context:
        url = f"{s3}/{context.checkpoint.upload(STORED, {'steps_completed': 1})}"
    paceline("checkpoint", "export", url, "out.safetensors", cwd=tmp_path)
    assert weight_in(tmp_path / "out.safetensors") == pytest.approx(-0.7)
    assert paceline("checkpoint", "download", url, "-o", "copy", cwd=tmp_path).stdout == "copy\n"
    assert {path.name for path in STORED.iterdir()} <= {
        path.name for path in (tmp_path / "copy").iterdir()
    }
    again = paceline("checkpoint", "download", url, "-o", "copy", cwd=tmp_path, code=1)
    assert "`DIR` must be a new directory, but 'copy' is there already" in again.stderr
    wrong = paceline("checkpoint", "download", "s3://bucket", cwd=tmp_path, code=1)
    assert wrong.stderr.startswith("Error: A checkpoint must be named by its storage and its UUID")
    missing = paceline("checkpoint", "download", f"{s3}/nothing", cwd=tmp_path, code=1)
    assert "Checkpoint nothing must be committed in" in missing.stderr
    assert not (tmp_path / "checkpoints").exists()
