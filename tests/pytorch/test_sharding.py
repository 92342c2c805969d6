"""Models that are divided among the ranks: as trained in one piece, and in checkpoints."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sharded_runs import LAUNCHER, SCRIPT, Training, assert_agree

from paceline.core import read_metrics
from paceline.journal import RunDirectory
from paceline.pytorch import load_trial_from_checkpoint_path, load_weights_from_checkpoint_path
from paceline.storage import CheckpointCorruptError

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("forked_ranks")]


def assert_divided(training: Training, num_ranks: int) -> None:
    """Check that the chief has held a piece of the model."""
    facts = training.facts()
    assert facts["num_all"] / num_ranks <= facts["num_own"] < facts["num_all"] * 0.6


# Some batches have samples for two of the ranks only, and validations for fewer. A quick one of
# three ranks is that with a kill, below.
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_sharded_model_is_trained_as_a_whole_one(
    whole: Training, tmp_path: Path, num_ranks: int
) -> None:
    sharded = Training(tmp_path / "run").run(num_ranks)
    assert_agree(whole, sharded)
    assert_divided(sharded, num_ranks)


# The last checkpoint before the kill is in the middle of an accumulated step.
@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("fsdp", 3), ("fsdp", 2)),
        pytest.param(("flat", 2), ("fsdp", 3), marks=pytest.mark.slow),
        pytest.param(("fsdp", 4), ("fsdp", 3), marks=pytest.mark.slow),
        pytest.param(("fsdp", 4), ("fsdp", 1), marks=pytest.mark.slow),
        pytest.param(("fsdp", 4), ("flat", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp", 3), ("overlapped", 2), marks=pytest.mark.slow),
        pytest.param(("flat", 2), ("fsdp", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp", 1), ("fsdp", 4), marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_in_another_division(
    whole: Training, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    training = Training(tmp_path / "run").run(first[1], first[0], is_killed=True)
    stored = json.loads((training.checkpoint() / "manifest.json").read_text())
    assert stored["metadata"]["steps_completed"] == 15
    assert_agree(whole, training.run(second[1], second[0]))


# Options of a sharded model, killed within an accumulated step, go on in another division.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("adapters lone", ("fsdp", 3), ("fsdp", 2)),
        ("adapters", ("fsdp", 3), ("flat", 1)),
        ("adapters lone", ("flat", 2), ("fsdp", 3)),
        ("lone", ("fsdp", 3), ("fsdp", 2)),
        ("lone", ("fsdp", 2), ("flat", 3)),
        ("meta", ("fsdp", 3), ("fsdp", 2)),
        ("recomputed compiled", ("fsdp", 3), ("fsdp", 2)),
        ("hybrid", ("fsdp", 4), ("fsdp", 3)),
        ("hybrid", ("fsdp", 3), ("fsdp", 4)),
        ("adapters meta hybrid", ("fsdp", 4), ("flat", 2)),
    ],
)
def test_options_go_on_in_another_division(
    tmp_path: Path, case: str, first: tuple[str, int], second: tuple[str, int]
) -> None:
    whole = Training(tmp_path / "whole", CASE=case).run(1, "flat")
    training = Training(tmp_path / "run", CASE=case)
    for (mode, num_ranks), is_killed in ((first, True), (second, False)):
        # Of four ranks, two times two hold a copy.
        training.variables.pop("SHARD_SIZE", None)
        if "hybrid" in case and (mode, num_ranks) == ("fsdp", 4):
            training.variables["SHARD_SIZE"] = "2"
        training.run(num_ranks, mode, is_killed=is_killed)
        if "adapters" in case:
            assert not any(name.startswith(("first", "blocks")) for name in training.weights())
        if "SHARD_SIZE" in training.variables:
            check_copies(training.checkpoint())
    assert_agree(whole, training)
    if "compiled" in case:
        [run] = (training.directory / "paceline_runs").iterdir()
        rows = read_metrics(RunDirectory(run), "profiling")
        # The last batch of an epoch has another size.
        assert max(row.metrics.get("num_recompiles", 0) for row in rows) > 0


def check_copies(checkpoint: Path) -> None:
    """Check that the first copy alone has stored its pieces."""
    assert {path.stem for path in checkpoint.glob("shard_*.json")} == {"shard_0", "shard_1"}


@pytest.mark.slow
def test_a_frozen_parameter_with_a_changed_piece_is_stored(tmp_path: Path) -> None:
    options = {"CASE": "adapters touched", "WINDOW": "1", "LENGTH": "6"}
    names = Training(tmp_path / "run", **options).run(3).weights().keys()
    expected = {"first.bias", "norm.weight", "norm.bias", "last.weight"}
    assert names == expected | {"adapter.weight", "adapter.bias"}


@pytest.mark.slow
def test_a_sharded_adapter_goes_on_with_its_own_base_alone(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", CASE="adapters", WINDOW="1").run(3, is_killed=True)
    for change, message in (
        ({"BASE": "8"}, "the same base (the-base), but 8 of 8 parameters"),
        ({"CASE": "adapters no adapter"}, "['adapter.bias', 'adapter.weight'] besides"),
        ({"SHARD_SIZE": "2"}, "`shard_size` must divide the number of ranks, but got 2 for 3"),
    ):
        before = dict(training.variables)
        training.variables |= change
        done = training.start(3)
        assert done.returncode == 1
        assert message in done.stdout + done.stderr
        training.variables = before


# Of batch 17, the chief's checkpoint of 15 may be on its way still.
@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_kill_of_any_rank_ends_in_the_same_training(
    whole: Training, tmp_path: Path, rank: int
) -> None:
    training = Training(tmp_path / "run", PACELINE_FAULT=f"engine.batch:17,signal=KILL,rank={rank}")
    done = training.start([*LAUNCHER, "3"])
    assert done.returncode == 128 + signal.SIGKILL
    assert f"Rank {rank} was ended by SIGKILL" in done.stdout + done.stderr
    training.variables.pop("PACELINE_FAULT")
    assert_agree(whole, training.run(3))
    assert_divided(training, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == "stream" else pytest.mark.slow)
        for case in (
            "stream",
            "class",
            "count",
            "function",
            "whole set",
            "dropout",
            "tied in one unit",
        )
    ],
)
def test_every_kind_of_training_can_be_sharded(tmp_path: Path, case: str) -> None:
    options = {"CASE": case, "LENGTH": "12", "WINDOW": "1"}
    if case == "dropout":
        # With one shard each, ranks draw the same numbers.
        options["SHARDS"] = "2"
    one = Training(tmp_path / "flat", **options).run(2, "flat")
    other = Training(tmp_path / "fsdp", **options).run(3 if case == "stream" else 2)
    assert one.samples() == other.samples()
    torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-9, atol=1e-12)
    assert one.facts()["loss"] == pytest.approx(other.facts()["loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("case", "precision", "messages"),
    [
        ("plain", "fp32", ["`Trial.train_batch` must not call `loss.backward()`"]),
        pytest.param(
            "tied", "fp32", ["'blocks.0.weight' and 'blocks.2.weight'"], marks=pytest.mark.slow
        ),
        pytest.param(
            "early optimizer", "fp32", ["model = context.wrap_model"], marks=pytest.mark.slow
        ),
        pytest.param("bf16", "bf16", ["`precision`", "`shard_precision`"], marks=pytest.mark.slow),
        pytest.param("", "fp16", ['"fp32" or "bf16"', '"fp16"'], marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    tmp_path: Path, case: str, precision: str, messages: list[str]
) -> None:
    training = Training(tmp_path / "run", CASE=case, PRECISION=precision, WINDOW="1")
    done = training.start(2)
    assert done.returncode == 1
    for message in messages:
        assert message in done.stderr + done.stdout


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> Training:
    """Return a short training by two ranks, for its checkpoint."""
    directory = tmp_path_factory.mktemp("stored") / "run"
    return Training(directory, LENGTH="6", WINDOW="1").run(2)


def test_the_lines_of_the_docs_load_a_sharded_model(
    stored: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
    block = guide.partition("A few lines of plain torch")[2].partition("```python\n")[2]
    lines = block.partition("```")[0].partition("model = MyTransformer()\n")[2]
    assert lines
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from sharded import Model

    model = Model().double()
    names = {"torch": torch, "Path": Path, "load_file": load_file}
    exec(lines, {"checkpoint": str(stored.checkpoint()), "model": model, **names})
    weights = stored.weights()
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())
    # Nothing is stored twice.
    assert not any(
        "weight" in name for name in load_file(stored.checkpoint() / "model_0.safetensors")
    )


def test_one_file_is_exported_from_the_pieces(stored: Training, tmp_path: Path) -> None:
    output = tmp_path / "weights.safetensors"
    command = ["checkpoint", "export", str(stored.checkpoint()), str(output)]
    subprocess.run([sys.executable, "-m", "paceline.cli", *command], check=True, timeout=240)
    exported = load_file(output)
    assert exported.keys() == stored.weights().keys() | {"num_calls"}
    assert all(torch.equal(exported[name], value) for name, value in stored.weights().items())


def test_the_trial_is_loaded_from_the_pieces(
    stored: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("SAMPLES", str(tmp_path))
    from sharded import Trial

    trial = load_trial_from_checkpoint_path(stored.checkpoint(), trial_class=Trial)
    loaded = dict(trial.model.named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in stored.weights().items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "shard_1"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "shard_1"),
        (lambda path: path.with_suffix(".json").unlink(), "'model_0."),
        (lambda path: path.with_suffix(".json").write_text("{"), "shard_1.json"),
    ],
)
def test_a_missing_or_damaged_piece_is_an_error(
    stored: Training, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    copy = shutil.copytree(stored.checkpoint(), tmp_path / "copy")
    for path in copy.iterdir():
        path.chmod(0o600)
    damage(copy / "shard_1.safetensors")
    with pytest.raises(CheckpointCorruptError, match=message):
        load_weights_from_checkpoint_path(copy)


@pytest.mark.slow
def test_an_altered_piece_is_not_gone_on_from(whole: Training, tmp_path: Path) -> None:
    training = Training(tmp_path / "run").run(2, is_killed=True)
    path = training.checkpoint() / "shard_1.safetensors"
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = training.start(3)
    assert "'shard_1.safetensors' was altered" in done.stdout + done.stderr
    # The checkpoint before it is taken.
    assert_agree(whole, training)
