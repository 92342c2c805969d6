"""W&B's offline runs, written by its client, as runs."""

import json
import math
import shutil
import struct
import zlib
from pathlib import Path

import pytest
from imported_runs import Import, media, points, run_script, tree

from paceline._base.run_directory import RunDirectory
from paceline.core import RunState, read_history, summarize_run
from paceline.importers._wandb_logs import _records

pytest.importorskip("wandb")

SCRIPT = """
import sys
from pathlib import Path
import numpy as np, wandb
model = Path(sys.argv[1]) / "model.txt"
model.write_text("weights")
with wandb.init(project="project", name="nice run", config={"lr": 0.5, "net": {"width": 8}},
                tags=["tag"], notes="note", dir=sys.argv[1]) as run:
    run.config.update({"late": 3})
    for step in range(3):
        run.log({"loss": 1.5 / (step + 1), "val/accuracy": step / 3, "note": "text",
                 "odd": float("nan") if step == 1 else float("inf")})
    zeros = np.zeros((4, 5, 3), dtype=np.uint8)
    run.log({"image": wandb.Image(zeros, caption="black"),
             "images": [wandb.Image(zeros, caption="a"), wandb.Image(zeros, caption="b")],
             "histogram": wandb.Histogram(np.arange(10.0)), "html": wandb.Html("<b>x</b>"),
             "table": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]])})
    run.summary["best"] = 7
    artifact = wandb.Artifact("weights", type="model")
    artifact.add_file(str(model))
    run.log_artifact(artifact)
    print("printed")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wandb")
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": str(root / "data"),
        "WANDB_CACHE_DIR": str(root / "cache"),
        "WANDB_CONFIG_DIR": str(root / "config"),
    }
    run_script(SCRIPT, root, **variables)
    return root


@pytest.fixture
def store(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_DATA_DIR", str(written / "data"))
    return Path(shutil.copytree(written / "wandb", tmp_path / "wandb", symlinks=True))


def log_of(store: Path) -> Path:
    (path,) = store.glob("offline-run-*/*.wandb")
    return path


def test_offline_run_comes_whole(store: Path, run_import: Import) -> None:
    (run,), problems = run_import(store)
    assert problems == []
    assert (run.name, run.state) == ("nice run", "new")
    values = {
        (s, k): v for g, s, row in points(run.path) if g == "training" for k, v in row.items()
    }
    assert math.isnan(values.pop((1, "odd")))
    assert values == {
        **{(step, "loss"): 1.5 / (step + 1) for step in range(3)},
        **{(step, "val/accuracy"): step / 3 for step in range(3)},
        **{(step, "note"): "text" for step in range(3)},
        (0, "odd"): math.inf,
        (2, "odd"): math.inf,
    }
    directory = RunDirectory(run.path)
    assert directory.read_info().hparams == {"lr": 0.5, "net": {"width": 8}, "late": 3}
    metadata = read_history(directory).metadata
    assert metadata is not None
    assert (metadata["project"], metadata["tags"], metadata["notes"]) == (
        "project",
        ["tag"],
        "note",
    )
    assert metadata["summary"]["best"] == 7
    assert summarize_run(run.path).state is RunState.COMPLETED


def test_media_and_artifacts_come_along(store: Path, run_import: Import) -> None:
    (run,), _ = run_import(store)
    logged = media(run.path)
    assert {logged[name].kind for name in ("image", "images")} == {"image"}
    assert [file.caption for file in logged["images"].files] == ["a", "b"]
    assert logged["html"].kind == "html"
    assert sum(logged["histogram"].value["counts"]) == 10
    (table,) = logged["table"].files
    text = (run.path / "files" / table.path).read_text()
    content = json.loads(text)
    assert (content["columns"], content["data"]) == (["a", "b"], [[1, "x"], [2, "y"]])
    (model,) = logged["artifacts/weights/model.txt"].files
    assert (run.path / "files" / model.path).read_text() == "weights"
    assert "printed" in (run.path / "files" / logged["output.log"].files[0].path).read_text()


def test_second_import_changes_nothing(store: Path, run_import: Import, tmp_path: Path) -> None:
    run_import(store)
    before = tree(tmp_path / "runs")
    (run,), _ = run_import(store)
    assert run.state == "unchanged"
    assert tree(tmp_path / "runs") == before


def test_log_that_ends_early_grows_to_the_whole(
    store: Path, run_import: Import, tmp_path: Path
) -> None:
    (whole,), _ = run_import(store)
    expected = points(whole.path)
    log = log_of(store)
    data = log.read_bytes()
    with log.open("rb") as file:
        ends = [end for end, _ in _records(file, log, [])]
    # Between two records, as a client leaves it that still runs; then within one.
    log.write_bytes(data[: ends[12]])
    (early,), problems = run_import(store.parent / "wandb", into=tmp_path / "again")
    assert problems == []
    assert summarize_run(early.path).state is RunState.CRASHED
    log.write_bytes(data[: ends[16] + 9])
    (later,), problems = run_import(store, into=tmp_path / "again")
    assert later.state == "grown"
    assert problems == [f"{log} ends within the record at byte {ends[16]}"]
    log.write_bytes(data)
    (last,), problems = run_import(store, into=tmp_path / "again")
    assert problems == []
    # It had no end before, so that its journal went on.
    summary = summarize_run(last.path)
    assert (summary.state, summary.num_attempts) == (RunState.COMPLETED, 1)
    key = lambda row: (row[0], row[1])  # noqa: E731
    assert repr(sorted(points(last.path), key=key)) == repr(sorted(expected, key=key))


def test_damaged_block_is_named_and_what_follows_comes(store: Path, run_import: Import) -> None:
    log = log_of(store)
    data = log.read_bytes()
    with log.open("rb") as file:
        ends = [end for end, _ in _records(file, log, [])]
    padding = 32768 - ends[-1] % 32768
    # The same records again in a second block, after a damaged one in the first.
    broken = bytearray(data[: ends[9]])
    broken[-1] ^= 0xFF
    whole = bytes(broken) + b"\0" * (32768 - len(broken)) + data[7:]
    log.write_bytes(whole)
    assert padding > 0
    (run,), problems = run_import(store)
    assert problems == [f"{log} is damaged at byte {ends[8]}, to the next block of it"]
    losses = [row[2]["loss"] for row in points(run.path) if "loss" in row[2]]
    assert losses[-3:] == [1.5, 0.75, 0.5]


def test_paths_of_a_hostile_log_are_refused(
    store: Path, run_import: Import, tmp_path: Path
) -> None:
    from wandb.proto import wandb_internal_pb2 as pb

    (tmp_path / "secret").write_text("secret")
    record = pb.Record()
    for name, path in (("up", "../../../secret"), ("absolute", str(tmp_path / "secret"))):
        item = record.history.item.add()
        item.key = name
        item.value_json = f'{{"_type": "image-file", "path": "{path}"}}'
    for name, text in (("half", '"\\ud800"'), ("huge", str(10**40))):
        record.history.item.add(key=name, value_json=text)
    far = pb.Record()
    far.history.item.add(key="_step", value_json=str(10**30))
    far.history.item.add(key="loss", value_json="1")
    large = pb.Record()
    large.summary.update.add(key="text", value_json=f'"{"x" * 2_000}"')
    stolen = pb.Record()
    stolen.artifact.name = "../../up"
    entry = stolen.artifact.manifest.contents.add()
    entry.path, entry.local_path = "file", str(tmp_path / "secret")
    log = log_of(store)
    data = log.read_bytes()
    for one in (record, far, large, stolen):
        body = one.SerializeToString()
        head = struct.pack("<IHB", zlib.crc32(body, zlib.crc32(b"\x01")), len(body), 1)
        data += head + body
    assert len(data) < 32768
    log.write_bytes(data)
    (log.parent / "files" / "link.txt").symlink_to(tmp_path / "secret")
    (run,), problems = run_import(store)
    assert [row[2] for row in points(run.path) if "half" in row[2]] == [{"half": "?", "huge": 1e40}]
    for text in (
        "'up' at step 0 could not be read",
        "'absolute' at step 0 could not be read",
        "What was logged at step 1000000000000000019884624838656 has no place here",
        "'artifacts/../../up/file' is not in the store",
        "'link.txt' is a link",
    ):
        assert sum(text in problem for problem in problems) == 1, (text, problems)
    assert len(problems) == 5
    assert not any(content == b"secret" for content in tree(run.path).values())
