"""States as files."""

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.creators._pass_states import (
    load_pass_state,
    read_pass_state,
    store_pass_state,
    write_pass_state,
)
from paceline.storage import CheckpointCorruptError, CheckpointNotFoundError, storage_from
from paceline.storage._checkpoint_errors import STATE_VERSION

SMALL = {"version": STATE_VERSION, "ranks": [], "models": [{"weight": torch.ones(3)}]}
LARGE = {"version": STATE_VERSION, "ranks": [], "models": [{"weight": torch.ones(1 << 19)}]}


def weight_of(state: dict[str, Any]) -> torch.Tensor:
    assert state.keys() == SMALL.keys()
    weight: torch.Tensor = state["models"][0]["weight"]
    return weight


def test_a_full_disk_leaves_the_earlier_file(small_disk: Path) -> None:
    path = small_disk / "checkpoint"
    write_pass_state(SMALL, path)
    with pytest.raises(OSError, match="No space left on device"):
        write_pass_state(LARGE, path)
    assert list(small_disk.iterdir()) == [path]
    assert weight_of(read_pass_state(path)).equal(torch.ones(3))


def flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def damaged(data: bytes) -> list[bytes]:
    """Return a file with flipped bits, at random places and at both ends, and cut off."""
    random.seed(0)
    places = [*random.sample(range(len(data)), 100), *range(8), *range(len(data) - 80, len(data))]
    flips = [flipped(data, place, random.randrange(8)) for place in places]
    ends = [0, 1, 21, 22, 51, *(len(data) - n for n in (1, 2, 22, 50, 52, 72, 73))]
    cuts = [data[:end] for end in (*ends, *random.sample(range(len(data)), 20))]
    return [*flips, *cuts, data + b"\0", data[: len(data) // 2] + data[len(data) // 2 + 1 :]]


def test_a_file_is_refused_after_any_damage(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    write_pass_state({**SMALL, "seed": 3, "place": {"rows": [1.5, None, "text"]}}, path)
    for data in damaged(path.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(
            CheckpointCorruptError, match=r"'.*state\.pt' must be a whole file .*Hint: copy it"
        ):
            read_pass_state(path)


def test_a_file_is_read_by_others(tmp_path: Path) -> None:
    write_pass_state(SMALL, tmp_path / "state.pt")
    assert weight_of(torch.load(tmp_path / "state.pt", weights_only=True)).equal(torch.ones(3))
    assert weight_of(torch.load(tmp_path / "state.pt", mmap=True)).equal(torch.ones(3))
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        assert archive.testzip() is None


def test_a_file_without_a_digest_is_read_as_torch_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(SMALL, path)
    assert weight_of(read_pass_state(path)).equal(torch.ones(3))
    data = path.read_bytes()
    place = data.index(torch.ones(3).numpy().tobytes())
    key = data.index(b"models")
    for changed in (flipped(data, place, 6), flipped(data, key, 1), data[:-1], data + b"x"):
        path.write_bytes(changed)
        with pytest.raises(CheckpointCorruptError, match="must be a whole file"):
            read_pass_state(path)
    torch.save(SMALL, path, _use_new_zipfile_serialization=False)
    assert weight_of(read_pass_state(path)).equal(torch.ones(3))


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^'.*/nothing\.pt' must be .* read.*Hint: give"):
        load_pass_state(tmp_path / "nothing.pt")
    with pytest.raises(IsADirectoryError, match=r"^'.*' must be .* read.*Is a dir.*Hint: give"):
        load_pass_state(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^'.*/no/x\.pt' must be .* written to.*Hint: na"):
        write_pass_state(SMALL, tmp_path / "no" / "x.pt")
    with pytest.raises(IsADirectoryError, match=r"^'.*' must be .* written to.*Hint: name a f"):
        write_pass_state(SMALL, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_is_checked_and_read_though_another_one_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "state.pt", tmp_path / "other.pt"
    write_pass_state(SMALL, path)
    other.write_bytes(path.read_bytes()[:-1])
    size_of = os.fstat

    def replace(descriptor: int) -> os.stat_result:
        if other.exists():
            other.replace(path)
        return size_of(descriptor)

    monkeypatch.setattr(os, "fstat", replace)
    read_pass_state(path)
    with pytest.raises(CheckpointCorruptError):
        read_pass_state(path)


def test_a_pipe_is_refused_and_a_link_is_followed(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="can be written to, but it cannot .it is a device, a pipe"):
        write_pass_state(SMALL, pipe)
    assert pipe.is_fifo()
    link.symlink_to(target)
    write_pass_state(SMALL, link)
    assert link.is_symlink()
    read_pass_state(target)


def test_a_state_goes_to_a_bucket_and_comes_back(s3: str) -> None:
    place = store_pass_state(LARGE, storage_from(s3), "best")
    assert place == f"{s3}/best"
    assert weight_of(load_pass_state(place)).equal(torch.ones(1 << 19))
    with pytest.raises(FileExistsError, match="immutable"):
        store_pass_state(SMALL, storage_from(s3), "best")
    with pytest.raises(CheckpointNotFoundError, match="other must be committed"):
        load_pass_state(f"{s3}/other")
