"""Checkpoints to which all ranks bring files: whole on all ranks, or an error on all."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from paceline import core
from paceline.core._run_storage import discard_unfinished
from paceline.journal import CheckpointStored, RunDirectory
from paceline.storage import DirectoryStorage

LEAVE = "\nimport os\nsys.stdout.flush()\nos._exit(0)\n"

BEGIN = """
import json, os, resource, signal, sys, time
from pathlib import Path
from paceline import core

found = {}
context = core.init().__enter__()
rank = context.distributed.rank
store = context.checkpoint.store_path
upload = context.checkpoint.upload

def attempt(name, body):
    "Note what became of a call; the ranks go from one to the next together."
    try:
        found[name] = body()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
    found["latest"] = context.latest_checkpoint

def stored(metadata, files, before_the_end=lambda: None):
    with store(metadata, shard=True) as (path, uuid):
        for file, content in files.items():
            (path / file).parent.mkdir(exist_ok=True)
            (path / file).write_text(content)
        before_the_end()
    return uuid

def raise_on(failing):
    def body():
        if rank == failing:
            raise KeyError("mine")
    return body

def of_rank(*values):
    return values[rank]
"""

END = """
sys.stdout.write(json.dumps(found) + "\\n")
context.__exit__(None, None, None)
"""


@pytest.fixture
def run_ranks(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that runs calls in three ranks, and gives what each rank has noted."""

    def run(calls: str) -> list[dict[str, Any]]:
        found = []
        for exit_code, output, errors in finish_ranks(start_ranks(BEGIN + calls + END + LEAVE)):
            assert exit_code == 0, errors
            found.append(json.loads(output.splitlines()[-1]))
        return found

    return run


def run_directory() -> Path:
    (path,) = Path("paceline_runs").iterdir()
    return path


def storage() -> DirectoryStorage:
    return DirectoryStorage(run_directory() / "checkpoints")


STORE = """
metadata = {"by": {f"rank {rank}": rank}, "note": "same", **of_rank({"steps_completed": 3}, {}, {})}
files = {f"of/{rank}": "x" * rank, "common": "same"}
attempt("stored", lambda: stored(metadata, files))
Path("source/deep").mkdir(parents=True, exist_ok=True)
for name in ("a.txt", "b.bin", "deep/c.txt"):
    Path("source", name).write_text(name)
context.distributed.allgather(None)
steps = {"steps_completed": 4}
attempt("same directory", lambda: upload("source", steps, shard=True))
Path(f"source-{rank}").mkdir()
Path(f"source-{rank}/{rank}").touch()
attempt("some", lambda: upload(of_rank(None, "source-1", "source-2"), steps, shard=True))
selector = of_rank("txt", "bin", "c.txt")
selects = lambda path: path.endswith(selector)
attempt("selected", lambda: upload("source", steps, shard=True, selector=selects))
"""


def test_files_and_metadata_of_all_ranks_become_one_checkpoint(
    run_ranks: Any, records_of: Callable[..., Any]
) -> None:
    by_rank = run_ranks(STORE)
    assert by_rank[1] == by_rank[0] == by_rank[2]
    found = by_rank[0]
    manifests = {name: storage().manifest(found[name]) for name in found if name != "latest"}
    assert {name: {*manifest.files} for name, manifest in manifests.items()} == {
        "stored": {"common", "of/0", "of/1", "of/2"},
        "same directory": {"a.txt", "b.bin", "deep/c.txt"},
        "some": {"1", "2"},
        "selected": {"a.txt", "b.bin", "deep/c.txt"},
    }
    assert manifests["stored"].metadata == {
        "steps_completed": 3,
        "note": "same",
        "by": {"rank 0": 0, "rank 1": 1, "rank 2": 2},
    }
    assert found["latest"] == found["selected"]
    records = records_of(run_directory(), CheckpointStored)
    assert [record.uuid for record in records] == [m.uuid for m in manifests.values()]
    # What any one rank has stored, any other can go on from.
    with core.init(resume=run_directory()) as context:
        assert context.latest_checkpoint == found["selected"]


REFUSED = """
steps = {"steps_completed": 1}
attempt("raises on 0", lambda: stored(steps, {f"{rank}": "x"}, raise_on(0)))
attempt("raises on 2", lambda: stored(steps, {f"{rank}": "x"}, raise_on(2)))

def interrupt():
    if rank == 2:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

try:
    attempt("interrupted", lambda: stored(steps, {f"{rank}": "x"}, interrupt))
except KeyboardInterrupt:
    found["interrupted"] = "KeyboardInterrupt: "
attempt("names", lambda: stored(steps, {"same": f"{rank}"}))
attempt("metadata", lambda: stored({**steps, "a": {"b": of_rank(1, 1, 2)}}, {}))
attempt("no steps", lambda: stored({"rank": 1}, {}))
attempt("plain", lambda: stored({**steps, "x": of_rank(1, {2}, 1)}, {}))
attempt("text", lambda: stored(of_rank(steps, "text", steps), {}))
attempt("number", lambda: upload(of_rank(".", ".", 5), steps, shard=True))
attempt("pattern", lambda: upload(".", steps, shard=True, selector=of_rank("*.pt", bool, bool)))
attempt("folder", lambda: stored(steps, {of_rank("n", "n/b", "n/c"): f"{rank}"}))
attempt("nothing", lambda: upload(None, steps, shard=True))
attempt("no directory", lambda: upload(of_rank(".", "missing", "."), steps, shard=True))
directory, selector = of_rank((".", None), (".", None), (None, bool))
attempt("selector", lambda: upload(directory, steps, shard=True, selector=selector))
if rank == 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
attempt("full", lambda: stored(steps, {f"{rank}": "x" * of_rank(1, 1, 1_000_000)}))
if rank == 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
if rank:
    attempt("without", lambda: store(steps).__enter__())
# The chief removes what was stored.
context.distributed.allgather(None)
found["left"] = sorted(path.name for path in (context.run_dir / "checkpoints").rglob("*"))
context.distributed.allgather(None)
attempt("in the end", lambda: stored(steps, {f"{rank}": "x"}))
"""

OWN = {
    "interrupted": (2, "KeyboardInterrupt: ", "but rank 2 failed: KeyboardInterrupt: "),
    "raises on 0": (0, "KeyError: 'mine'", "all ranks must store their files, but rank 0 failed:"),
    "raises on 2": (2, "KeyError: 'mine'", "but rank 2 failed: KeyError: 'mine'"),
    "plain": (1, "TypeError: `metadata` must be JSON-able", "but rank 1 failed: TypeError"),
    "text": (1, "TypeError: `metadata` must be a dictionary, but got 'text'", "rank 1 failed: Typ"),
    "number": (2, "TypeError: ", "but rank 2 failed: TypeError"),
    "pattern": (0, "TypeError: `selector` must be a function, but got '*.pt'", "rank 0 failed: Ty"),
    "no directory": (1, "NotADirectoryError: A checkpoint must be", "but rank 1 failed: NotADir"),
    "selector": (2, "ValueError: `selector` must come with a `ckpt_dir`", "rank 2 failed: Value"),
    "full": (2, "CheckpointWriteError: ", "but rank 2 failed: CheckpointWriteError"),
}
ALL = {
    "metadata": "ValueError: The ranks must agree on the `metadata`, but 'a.b' is 2 on rank 2",
    "no steps": "ValueError: `metadata` must hold 'steps_completed'",
    "nothing": "ValueError: `ckpt_dir` must be a directory on one rank at least",
}


def test_what_fails_on_one_rank_raises_on_all_and_leaves_nothing(run_ranks: Any) -> None:
    by_rank = run_ranks(REFUSED)
    for name, (failing, own, of_others) in OWN.items():
        for rank, found in enumerate(by_rank):
            if rank == failing:
                assert found[name].startswith(own)
            else:
                assert found[name].startswith("DistributedPeerError: With `shard=True` all ranks")
                assert of_others in found[name]
    for name, text in ALL.items():
        assert all(found[name].startswith(text) for found in by_rank)
    assert any("FileExistsError: Files that several ranks" in f["names"] for f in by_rank) or all(
        "must agree on every file they share" in found["names"] for found in by_rank
    )
    assert all("Error: " in found["folder"] for found in by_rank)
    named = (
        "is below the file of another rank",
        "is a directory of another rank",
        "or the same content, but another 'n'",
    )
    assert any(name in found["folder"] for found in by_rank for name in named)
    for found in by_rank[1:]:
        assert found["without"].startswith("RuntimeError: Only the chief may store checkpoints")
        assert "or have all ranks store together by `shard=True`" in found["without"]
        assert found["left"] == []
    assert len({found["in the end"] for found in by_rank}) == 1
    assert storage().list() == [by_rank[0]["in the end"]]


@pytest.mark.parametrize("killed", [0, 2])
def test_a_rank_that_is_killed_leaves_no_checkpoint(
    killed: int, start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = f"""
def kill():
    if rank == {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
stored({{"steps_completed": 1}}, {{f"{{rank}}": "x"}}, kill)
"""
    results = finish_ranks(start_ranks(BEGIN + code + LEAVE))
    for rank, (exit_code, _, errors) in enumerate(results):
        if rank == killed:
            assert exit_code == -signal.SIGKILL
        else:
            assert exit_code == 1
            assert "Error" in errors
    assert storage().list() == []
    # Whoever knows that all have ended can remove what the chief has left.
    discard_unfinished(RunDirectory.open(run_directory()))
    assert [*(run_directory() / "checkpoints").iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_in_time(
    absent: int, start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = f"""
context.distributed.allgather(None)
context.distributed.timeout_s = 2
if rank == {absent}:
    time.sleep(20)
else:
    attempt("stored", lambda: stored({{"steps_completed": 1}}, {{f"{{rank}}": "x"}}))
    sys.stdout.write(json.dumps(found) + "\\n")
    # Rank 0 hosts the store by which a slower rank still waits.
    time.sleep(5)
"""
    results = finish_ranks(start_ranks(BEGIN + code + LEAVE))
    for rank, (exit_code, output, errors) in enumerate(results):
        assert exit_code == 0, errors
        if rank != absent:
            told = json.loads(output.splitlines()[-1])["stored"]
            assert told.startswith("DistributedTimeoutError: All ranks must call")
            assert f"Missing ranks: {absent}." in told
    assert storage().list() == []


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_checkpoint_with_a_lost_or_altered_shard_is_passed_over_and_named(
    rank: int, is_missing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with core.init() as context:
        for step in (1, 2):
            with context.checkpoint.store_path({"steps_completed": step}):
                pass
        damaged = str(uuid4())
        for shard in range(3):
            with context.checkpoint.storage.store_shard(damaged, shard) as path:
                (path / f"rank_{shard}.json").write_text("{}")
        context.checkpoint._commit(damaged, {"steps_completed": 3}, num_shards=3)
    file = context.run_dir / "checkpoints" / damaged / f"rank_{rank}.json"
    file.unlink()
    if not is_missing:
        file.write_text("[]")
    with core.init(resume=context.run_dir) as resumed:
        assert resumed.latest_checkpoint is not None
        assert resumed.checkpoint.get_metadata(resumed.latest_checkpoint)["steps_completed"] == 2
    state = "is missing" if is_missing else "was altered"
    assert f"'rank_{rank}.json' {state}" in caplog.text
