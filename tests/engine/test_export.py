"""Weights in safetensors files: from one file or from pieces, in little memory, tied ones once."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

from paceline._training.engine.checkpoints import weight_exports
from paceline._training.engine.checkpoints.state_format import (
    read_training,
    read_weights,
    save_state,
)
from paceline._training.engine.checkpoints.tensor_reader import (
    _DTYPES,
    ShardedTensor,
    StoredTensor,
    TensorFile,
    WholeTensors,
    write_tensor_file,
)
from paceline._training.engine.checkpoints.weight_exports import export_dcp, export_weights
from paceline.pytorch import load_weights_from_checkpoint_path
from paceline.storage import CheckpointCorruptError, CheckpointNotFoundError, DirectoryStorage
from paceline.storage._checkpoint_errors import STATE_VERSION, CheckpointMismatchError

# Cut along the first dimension, along the second, along both, and stored by one rank alone.
CUTS: dict[str, list[tuple[int, tuple[slice, ...]]]] = {
    "rows": [(0, (slice(0, 3),)), (1, (slice(3, 5),))],
    "columns": [(0, (slice(0, 5), slice(0, 1))), (2, (slice(0, 5), slice(1, 4)))],
    "tiles": [
        (0, (slice(0, 2), slice(0, 2))),
        (1, (slice(2, 5), slice(0, 2))),
        (2, (slice(0, 5), slice(2, 4))),
    ],
    "half": [(1, (slice(0, 4),))],
}


def whole_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "rows": torch.randn(5, 3, generator=generator),
        "columns": torch.randn(5, 4, 2, generator=generator),
        "tiles": torch.randn(5, 4, generator=generator, dtype=torch.float64),
        "half": torch.randn(4, generator=generator).bfloat16(),
        "tied": torch.empty(0),
        "in one file": torch.arange(7),
        "scalar": torch.tensor(3, dtype=torch.uint8),
        "nothing": torch.empty(0, 2),
        "flags": torch.tensor([[True, False]]),
        "also tied": torch.empty(0),
    }


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a checkpoint of a model that three ranks have stored, and the model's weights."""
    weights = whole_weights()
    weights["tied"], weights["also tied"] = weights["rows"], weights["in one file"]
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    state: dict[str, Any] = {**weights, "_extra_state": "text"}
    shards: list[dict[str, Any]] = [{"offsets": {}} for _ in range(3)]
    for name, cuts in CUTS.items():
        for rank, cut in cuts:
            piece = weights[name][cut].contiguous()
            for each in (name, "tied") if name == "rows" else (name,):
                shards[rank][f"model_0.{each}"] = piece
                starts = [part.start for part in cut] + [0] * (piece.dim() - len(cut))
                shards[rank]["offsets"][f"model_0.{each}"] = starts
    for name in (*CUTS, "tied"):
        shape = tuple(weights[name].shape)
        state[name] = ShardedTensor(f"model_0.{name}", shape, weights[name].dtype)
    save_state(state, directory, "model_0")
    save_state({"version": STATE_VERSION, "num_models": 1}, directory, "training")
    for rank, shard in enumerate(shards):
        save_state(shard, directory, f"shard_{rank}")
    return directory, weights


def assert_equal(exported: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        assert exported[name].dtype == value.dtype
        assert torch.equal(exported[name], value), name


@pytest.mark.parametrize("block_bytes", [1, 2**24])
def test_pieces_of_several_ranks_become_one_file(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(weight_exports, "_BLOCK_BYTES", block_bytes)
    directory, weights = sharded
    exported = export_weights(directory, tmp_path / "out")
    assert exported.files == (tmp_path / "out",)
    assert exported.left_out == ("_extra_state",)
    assert exported.tied == {"tied": "rows", "also tied": "in one file"}
    assert exported.base is None
    kept = {name: value for name, value in weights.items() if "tied" not in name}
    assert_equal(load_file(tmp_path / "out"), kept)
    with safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata() == {**exported.tied, "format": "pt"}
    export_weights(directory, tmp_path / "each", repeat_tied=True)
    assert_equal(load_file(tmp_path / "each"), weights)
    assert_equal(
        {
            k: v
            for k, v in read_weights(directory, read_training(directory), 0).items()
            if k[0] != "_"
        },
        weights,
    )


def test_several_files_have_an_index(sharded: Any, tmp_path: Path) -> None:
    directory, weights = sharded
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("{}")
    exported = export_weights(directory, output, max_shard_size="200 B")
    # 60; 160; 160 and 8; 56 and the rest.
    assert [path.name for path in exported.files] == [
        f"model-{number:05}-of-00004.safetensors" for number in (1, 2, 3, 4)
    ]
    index = json.loads((output / "model.safetensors.index.json").read_text())
    joined = {}
    for path in exported.files:
        tensors = load_file(path)
        assert sum(value.nbytes for value in tensors.values()) <= 200
        assert all(index["weight_map"][name] == path.name for name in tensors)
        joined |= tensors
    assert_equal(joined, {name: v for name, v in weights.items() if name not in exported.tied})
    assert index["weight_map"].keys() == joined.keys()
    assert index["metadata"] == {"total_size": sum(v.nbytes for v in joined.values())}
    with pytest.raises(FileExistsError, match="model-00001-of-00004.safetensors' is there"):
        export_weights(directory, output, max_shard_size=200)
    assert len(list(output.iterdir())) == 6
    for size in ("5XB", "-1", 0, "GB"):
        with pytest.raises(ValueError, match=f"'5GB' or '500MiB', but got {size!r}"):
            export_weights(directory, output, max_shard_size=size)
    # What fits one file has no index, and a tensor that is larger has a file of its own.
    exported = export_weights(directory, tmp_path / "one", max_shard_size="1MiB")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert len(export_weights(directory, tmp_path / "each", max_shard_size=1).files) == 7


def test_tied_weights_are_loaded_by_the_tools_of_safetensors(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    stored, loaded = model(), model()
    save_state(dict(stored.state_dict()), tmp_path, "model_0")
    save_state({"version": STATE_VERSION, "num_models": 1}, tmp_path, "training")
    export_weights(tmp_path, tmp_path / "out")
    assert load_model(loaded, tmp_path / "out") == (set(), [])
    assert all(map(torch.equal, loaded.parameters(), stored.parameters()))


@pytest.mark.parametrize("name", _DTYPES)
def test_every_type_is_written_and_read(tmp_path: Path, name: str) -> None:
    dtype = _DTYPES[name]
    bits = torch.arange(64, dtype=torch.uint8)
    value = (bits % 2 if dtype == torch.bool else bits).view(dtype).reshape(4, -1)
    save_file({"value": value, "byte": bits[:1].clone()}, tmp_path / "theirs")
    stored = WholeTensors(TensorFile(tmp_path / "theirs")).tensors()["value"]
    tensors = {
        "byte": (torch.uint8, [1], [bits[:1]]),
        "value": (stored.dtype, stored.shape, stored.blocks(16)),
    }
    write_tensor_file(tmp_path / "ours", tensors, {})
    read = load_file(tmp_path / "ours")["value"]
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), value.view(torch.uint8))


def test_any_part_of_a_tensor_is_read(tmp_path: Path) -> None:
    value = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    save_file({"value": value}, tmp_path / "file")
    stored = WholeTensors(TensorFile(tmp_path / "file")).tensors()["value"]
    for offset, shape in [
        ((0, 0, 0, 0), (2, 3, 4, 5)),
        ((1, 0, 0, 0), (1, 3, 4, 5)),
        ((1, 2, 1, 3), (1, 1, 2, 2)),
        ((1, 2, 3, 1), (1, 1, 1, 3)),
        ((1, 2, 3, 4), (1, 1, 1, 1)),
        ((0, 1, 0, 2), (2, 2, 1, 2)),
    ]:
        where = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        assert torch.equal(stored.read(shape, offset), value[where])
    for size in (1, 8, 24, 40, 41, 320, 10**6):
        blocks = list(stored.blocks(size))
        assert torch.equal(torch.cat([block.reshape(-1) for block in blocks]), value.reshape(-1))
        assert all(block.nbytes <= max(size, 8) for block in blocks)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "shard_1.safetensors").unlink(), r"shard_1\.safetensors"),
        (lambda path: _cut(path / "shard_1.safetensors"), r"shard_1\.safetensors"),
        (lambda path: (path / "shard_1.json").unlink(), "'model_0.tiles', but 6 of 20 values"),
        (lambda path: (path / "shard_0.json").write_text('{"offsets": {"a": [0]}}'), "shard_0"),
        (lambda path: (path / "model_0.safetensors").unlink(), r"model_0\.safetensors"),
        (lambda path: _cut(path / "model_0.safetensors"), r"model_0\.safetensors"),
    ],
)
def test_what_is_damaged_is_named_and_leaves_no_file(
    sharded: Any, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    directory, _ = sharded
    damage(directory)
    with pytest.raises(CheckpointCorruptError, match=message):
        export_weights(directory, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("reads", [export_weights, export_dcp, load_weights_from_checkpoint_path])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_deletion_meanwhile_is_told(
    sharded: Any,
    tmp_path: Path,
    reads: Callable[..., Any],
    scheme: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, _ = sharded
    storage = DirectoryStorage(tmp_path / "storage")
    with storage.store_path("a") as path:
        shutil.copytree(directory, path, dirs_exist_ok=True)
    storage.commit("a", {})
    opened = TensorFile.__init__

    def delete_and_open(self: TensorFile, *args: Any) -> None:
        if storage.exists("a"):
            storage.delete("a")
        opened(self, *args)

    monkeypatch.setattr(TensorFile, "__init__", delete_and_open)
    output = () if reads is load_weights_from_checkpoint_path else (tmp_path / "out",)
    place = f"{scheme}{tmp_path / 'storage' / 'a'}"
    with pytest.raises(
        CheckpointNotFoundError, match=r"checkpoint .*storage.*it was deleted meanwhile.*newer"
    ):
        reads(place, *output)
    if scheme:
        with pytest.raises(
            CheckpointNotFoundError, match=r"a must be committed in .*storage', .*there is"
        ):
            reads(place, *output)
    else:
        with pytest.raises(
            CheckpointMismatchError, match=r"storage/a', but there is nothing.*newer"
        ):
            reads(place, *output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "https://host/a",
            r"named by a path or a URL \(file://.*s3://\), but got 'https://host/a'",
        ),
        ("ftp://bucket/a", r"but got 'ftp://bucket/a'\. Hint: download"),
        ("s3://bucket", "by its storage and its UUID, .* s3://bucket/prefix/UUID"),
        ("s3://bucket/not a uuid", "by its storage and its UUID, .* s3://bucket/prefix/UUID"),
        ("file:///nowhere/a", "a must be committed in '/nowhere', .* s3://bucket/prefix/UUID"),
    ],
)
def test_what_is_no_url_of_a_checkpoint_is_named(tmp_path: Path, place: str, message: str) -> None:
    with pytest.raises((ValueError, CheckpointNotFoundError), match=message):
        export_weights(place, tmp_path / "out")


def test_a_checkpoint_that_is_not_whole_yet_is_told(sharded: Any, tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path / "storage")
    with (
        storage.store_path("a") as path,
        pytest.raises(CheckpointNotFoundError, match="is being deleted, or is not whole yet"),
    ):
        export_weights(path, tmp_path / "out")
    directory, _ = sharded
    (directory / "training.json").unlink()
    with pytest.raises(CheckpointMismatchError, match=r"has no training\.json"):
        export_weights(directory, tmp_path / "out")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


MEASURED = """
import sys
from pathlib import Path
from paceline._training.engine.checkpoints.weight_exports import export_dcp, export_weights

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

before = peak()
for size in (None, "100MB"):
    export_weights(sys.argv[1], f"{sys.argv[1]}/out {size}", max_shard_size=size)
print(peak() - before)
export_dcp(sys.argv[1], f"{sys.argv[1]}/dcp")
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    num_rows, num_columns = 2**13, 2**12
    weight = torch.randn(num_rows, num_columns)
    state: dict[str, Any] = {f"whole {index}": weight.clone() for index in range(4)}
    shards: list[dict[str, Any]] = [{"offsets": {}} for _ in range(2)]
    for index in range(2):
        name = f"model_0.{index}"
        state[f"sharded {index}"] = ShardedTensor(name, (2 * num_rows, num_columns), weight.dtype)
        for rank, shard in enumerate(shards):
            shard[name] = weight + rank + index
            shard["offsets"][name] = [rank * num_rows, 0]
    save_state(state, tmp_path, "model_0")
    save_state({"version": STATE_VERSION, "num_models": 1}, tmp_path, "training")
    for rank, shard in enumerate(shards):
        save_state(shard, tmp_path, f"shard_{rank}")
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert num_bytes > 1e9
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    weights, with_dcp = map(int, result.stdout.split())
    print(f"{num_bytes / 1e9:.2f} GB: {weights / 1e6:.0f} MB of memory, DCP {with_dcp / 1e6:.0f}")
    assert weights < 200e6
    # It has whole tensors in memory; the largest is a quarter.
    assert with_dcp < 0.85 * num_bytes
    exported = load_file(tmp_path / "out None")
    assert torch.equal(exported["sharded 1"], torch.cat([weight + 0 + 1, weight + 1 + 1]))


@pytest.mark.slow
def test_transformers_loads_what_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="NOT TESTED: needs transformers")
    # Its progress bars would leave a thread behind.
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16, tie_word_embeddings=True
    )
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    save_state(dict(model.state_dict()), tmp_path, "model_0")
    save_state({"version": STATE_VERSION, "num_models": 1}, tmp_path, "training")
    for size in ("20KB", "1GB"):
        output = tmp_path / size
        config.save_pretrained(output)
        exported = export_weights(tmp_path, output, max_shard_size=size)
        assert exported.tied == {"lm_head.weight": "transformer.wte.weight"}
        assert (len(exported.files) == 1) == (size == "1GB")
        for kind, expected in (
            (transformers.AutoModelForCausalLM, model),
            (transformers.AutoModel, model.transformer),
        ):
            loaded, info = kind.from_pretrained(output, output_loading_info=True)
            assert not info["missing_keys"]
            state = expected.state_dict()
            assert loaded.state_dict().keys() == state.keys()
            assert all(torch.equal(v, state[name]) for name, v in loaded.state_dict().items())


def test_a_whole_tensor_is_stored_as_one_piece(tmp_path: Path) -> None:
    value = torch.randn(3, 2)
    save_file({"value": value}, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    (tmp_path / "file").unlink()
    assert torch.equal(WholeTensors(file).tensors()["value"].whole(), value)
    missing = StoredTensor(ShardedTensor("other", (2,), value.dtype), _NoFiles())
    with pytest.raises(CheckpointCorruptError, match="'other', but 2 of 2 values"):
        missing.whole()


class _NoFiles:
    def pieces(self, name: str) -> Any:
        return ()
