"""Checkpoints and logs of other trainers: found when complete, read without running them."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from paceline.testing._compare_runs import (
    DAMAGED,
    UNREADABLE,
    UNREADABLE_ASIDE,
    UnreadableFileError,
    compare_checkpoints,
    read_file,
)
from paceline.testing._script_runs import file_stamps, loss_distance, read_logs
from paceline.testing._trainer_adapters import ADAPTERS, CheckpointWatch, TrainerAdapter


class Command:
    """A pickle of it runs a command when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def differences(tmp_path: Path, file: str, left: Any, right: Any, **options: Any) -> list[Any]:
    """Return kind, rank and path of the differences of two torch files."""
    paths = []
    for run, content in (("a", left), ("b", right)):
        paths.append(tmp_path / run / file)
        paths[-1].parent.mkdir(exist_ok=True)
        torch.save(content, paths[-1])
    found = compare_checkpoints(
        "out/checkpoint-4", {file: paths[0]}, {file: paths[1]}, 4, **{"unpickle": False, **options}
    )
    assert all(one.step == 4 and one.place == f"out/checkpoint-4/{file}" for one in found)
    return [
        (one.kind, one.rank, one.path)
        for one in compare_checkpoints(
            "c", {file: paths[0]}, {file: paths[1]}, 4, **{"unpickle": False, **options}
        )
    ]


def optimizer_state(lr: float, momentum: float) -> dict[str, Any]:
    return {
        "state": {0: {"momentum_buffer": torch.full((3,), momentum)}},
        "param_groups": [{"lr": lr}],
    }


def test_kind_and_rank_of_a_difference_are_named(tmp_path: Path) -> None:
    assert differences(
        tmp_path, "optimizer.pt", optimizer_state(0.1, 1.0), optimizer_state(0.2, 2.0)
    ) == [
        ("optimizer state", None, "state.0.momentum_buffer"),
        ("learning rate", None, "param_groups[0].lr"),
    ]
    cpu = torch.zeros(8, dtype=torch.uint8)
    assert differences(tmp_path, "rng_state_3.pth", {"cpu": cpu}, {"cpu": cpu + 1}) == [
        ("random state", 3, "cpu")
    ]
    assert differences(tmp_path, "sampler.bin", {"epoch": 1}, {"epoch": 2}) == [
        ("data order", None, "epoch")
    ]
    weights = {"net.0.weight": torch.tensor([0.0])}
    assert differences(tmp_path, "state.pt", weights, {"net.0.weight": torch.tensor([-0.0])}) == [
        ("weights", None, "net.0.weight")
    ]
    assert differences(tmp_path, "state.pt", {"train_runtime": 1.0}, {"train_runtime": 2.0}) == []


def test_random_state_of_numpy_is_read_safely(tmp_path: Path) -> None:
    states = [np.random.RandomState(seed).get_state() for seed in (1, 2)]
    content = [{"numpy_random_seed": state} for state in states]
    found = differences(tmp_path, "random_states_0.pkl", content[0], content[1])
    assert found == [("random state", 0, "numpy_random_seed[1]")]
    assert differences(tmp_path, "random_states_0.pkl", content[0], content[0]) == []


def test_pickles_are_not_run_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left, right = {"a": Command(), "b": 1}, {"a": Command(), "b": 2}
    assert differences(tmp_path, "optimizer.bin", left, right) == [(UNREADABLE, None, "")]
    assert differences(tmp_path, "training_args.bin", left, right) == [(UNREADABLE_ASIDE, None, "")]
    with pytest.raises(UnreadableFileError, match=r"runs code .*Hint: `--allow-unpickling`"):
        read_file(tmp_path / "a" / "optimizer.bin", unpickle=False)
    assert not (tmp_path / "ran").exists()
    read_file(tmp_path / "a" / "optimizer.bin", unpickle=True)
    assert (tmp_path / "ran").exists()


def test_damaged_files_are_differences_of_their_own(tmp_path: Path) -> None:
    for name, content in (
        ("model.safetensors", b"\xff" * 40),
        ("optimizer.pt", b"PK\x03\x04 cut"),
        ("trainer_state.json", b'{"log'),
        ("model.bin", b""),
    ):
        paths = [tmp_path / f"{run}-{name}" for run in "ab"]
        paths[0].write_bytes(content)
        paths[1].write_bytes(content + b" ")
        [one] = compare_checkpoints("c", {name: paths[0]}, {name: paths[1]}, 1, unpickle=False)
        assert one.kind == DAMAGED
        assert "damaged or incomplete" in one.detail
    whole = {"a.pt": paths[0]}
    [one] = compare_checkpoints("c", whole, {}, 1, unpickle=False)
    assert one.detail == "only the straight run has this file"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_is_compared_by_content(tmp_path: Path) -> None:
    for run, value, seed in (("a", 1.0, 1), ("b", 1.0, 1), ("c", 2.0, 2)):
        state = {
            "model": {"weight": torch.full((4,), value)},
            "dataloader": {"dp_rank_0": pickle.dumps({"position": seed})},
        }
        dcp.save(state, checkpoint_id=tmp_path / run, no_dist=True)
    files = [{one.name: one for one in (tmp_path / run).iterdir()} for run in "abc"]
    assert list(compare_checkpoints("step-8", files[0], files[1], 8, unpickle=False)) == []
    found = list(compare_checkpoints("step-8", files[0], files[2], 8, unpickle=False))
    shown = {(one.kind, one.rank, one.place, one.path) for one in found}
    assert shown == {
        ("weights", 0, "step-8/__0_0.distcp", "model.weight at [0]"),
        ("data order", 0, "step-8/__0_0.distcp", "dataloader.dp_rank_0.position"),
    }
    (tmp_path / "c" / "__0_0.distcp").write_bytes(b"cut")
    [one] = compare_checkpoints("step-8", files[0], files[2], 8, unpickle=False)
    assert one.kind == DAMAGED


def test_checkpoint_is_found_when_its_last_file_is_there(tmp_path: Path) -> None:
    watch = CheckpointWatch(tmp_path, ADAPTERS)
    checkpoint = tmp_path / "out" / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"")
    watch.look(now=True)
    assert watch.versions == {}
    assert watch.is_writing(ADAPTERS[0])
    # What an earlier crash left there is not being written.
    os.utime(checkpoint / "model.safetensors", (1, 1))
    assert not watch.is_writing(ADAPTERS[0])
    (checkpoint / "trainer_state.json").write_text("{}")
    assert not watch.is_writing(ADAPTERS[0])
    watch.look(now=True)
    assert [name for name, _ in watch.versions["transformers"]] == ["out/checkpoint-20"]
    assert "torch" not in watch.versions


def test_checkpoints_of_one_look_are_in_the_order_in_which_they_were_written(
    tmp_path: Path,
) -> None:
    """A quick script writes several between two looks; the newest one is resumed."""
    numbers = [8, 10, 7, 9, 11, 6]
    for number in numbers:
        path = tmp_path / f"step-{number}.json"
        path.write_text("{}")
        os.utime(path, (number, number))
    adapter = TrainerAdapter(name="pattern", glob="step-*.json")
    watch = CheckpointWatch(tmp_path / "new", (adapter,))
    for path in tmp_path.glob("*.json"):
        (tmp_path / "new").mkdir(exist_ok=True)
        path.rename(tmp_path / "new" / path.name)
    watch.look(now=True)
    found = [name for name, _ in watch.versions["pattern"]]
    assert found == [f"step-{number}.json" for number in sorted(numbers)]


def test_single_files_are_complete_when_they_can_be_read(tmp_path: Path) -> None:
    watch = CheckpointWatch(tmp_path, ADAPTERS)
    path = tmp_path / "epoch=1-step=7.ckpt"
    torch.save({"state_dict": torch.zeros(9)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    watch.look(now=True)
    assert watch.versions == {}
    assert watch.complete(ADAPTERS[3])[1] == [path.name]
    path.write_bytes(whole)
    watch.look(now=True)
    # Overwritten, it counts once more.
    torch.save({"state_dict": torch.ones(99)}, path)
    watch.look(now=True)
    assert [name for name, _ in watch.versions["lightning"]] == [path.name] * 2


def test_pattern_names_files_and_directories() -> None:
    adapter = TrainerAdapter(name="pattern", glob="out/step*")
    assert adapter.checkpoint("out/step4/model.bin") == "out/step4"
    assert adapter.checkpoint("out/step4.pt") == "out/step4.pt"
    assert adapter.checkpoint("other/step4.pt") is None


def test_logs_of_many_forms_are_read_without_timings(tmp_path: Path) -> None:
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0" / "metrics.csv").write_text(
        "epoch,step,loss,seconds\n0,1,0.5,9\n0,2,,\n"
    )
    (tmp_path / "log.jsonl").write_text('{"step": 3, "loss": NaN}\n{"step": 4, "lo')
    (tmp_path / "trainer_state.json").write_text(
        '{"log_history": [{"step": 5, "loss": 0.25, "train_runtime": 3}]}'
    )
    output = tmp_path / "run.log"
    output.write_text(
        "\x1b[31mstep: 6\x1b[0m  loss:  7.5  tps: 5\nEpoch 3: nothing\r{'step': 7, 'lr': '1e-3'}"
    )
    rows = read_logs(tmp_path, file_stamps(tmp_path), output)
    assert rows[1] == {"metrics.csv:loss": 0.5}
    assert repr(rows[3]) == "{'log.jsonl:loss': nan}"
    assert rows[5] == {"trainer_state.json:loss": 0.25}
    assert rows[6] == {"output:loss": 7.5}
    assert rows[7] == {"output:lr": 0.001}
    assert loss_distance(rows, {5: {"trainer_state.json:loss": 0.2}}) == pytest.approx(0.2)
    assert loss_distance({1: {"output:lr": 1.0}}, rows) is None
