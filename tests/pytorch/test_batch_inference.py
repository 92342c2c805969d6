"""Batch inference: each row once, whatever happens in between."""

import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import core, pytorch
from paceline._base.files import replacing_atomically
from paceline.journal import RunDirectory
from paceline.pytorch import _batch_inference as _inference_progress
from paceline.pytorch._batch_inference import TorchBatchProcessorContext
from paceline.storage import DirectoryStorage

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parent / "inference.py"
GUIDE = Path(__file__).parents[2] / "docs" / "batch-inference.md"
NUM_SAMPLES, BATCH_SIZE = 61, 3
NUM_BATCHES = 21
HOST = socket.gethostname()


def rows_in(directory: Path) -> list[int]:
    return sorted(int(row) for path in directory.rglob("rows") for row in path.read_text().split())


def assert_complete(directory: Path) -> None:
    """Check that the results have each row once, and the metric all of them."""
    assert rows_in(directory / "results") == list(range(NUM_SAMPLES))
    [run] = (directory / "paceline_runs").iterdir()
    [report] = core.read_metrics(RunDirectory(run), "validation")
    assert report.steps_completed == NUM_BATCHES
    assert report.metrics == {"total": [sum(range(NUM_SAMPLES)), NUM_BATCHES]}
    assert core.summarize_run(run).state is core.RunState.COMPLETED


class Interrupted(Exception):
    """Raised by a processor to be interrupted."""


def make_processor(log: list[int], stops_at: int | None = None) -> Any:
    class Processor(pytorch.TorchBatchProcessor):
        def __init__(self, context: TorchBatchProcessorContext) -> None:
            self.context = context
            self.total = context.wrap_reducer(lambda values: [sum(values), len(values)], "total")
            self.model = context.prepare_model_for_inference(torch.nn.Dropout())
            assert not self.model.training
            with pytest.raises(RuntimeError, match="must be called while batches are processed"):
                context.output_path()

        def process_batch(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == stops_at:
                raise Interrupted
            assert not torch.is_grad_enabled()
            values = self.model(self.context.to_device(batch)).tolist()
            log.append(batch_idx)
            self.total.update(sum(values))
            with (self.context.output_path() / "rows").open("a") as file:
                file.writelines(f"{value}\n" for value in values)

    return Processor


def process(log: list[int], stops_at: int | None = None, **options: Any) -> bool:
    return pytorch.torch_batch_process(
        make_processor(log, stops_at),
        options.pop("dataset", torch.arange(NUM_SAMPLES)),
        options.pop("batch_size", BATCH_SIZE),
        **{"output_dir": "results", "name": "inference", **options},
    )


def test_an_interrupted_run_goes_on_behind_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log: list[int] = []
    with pytest.raises(Interrupted):
        process(log, stops_at=13)
    assert log == list(range(13))
    # What was made after the checkpoint at 10 is there until the run goes on.
    assert rows_in(tmp_path / "results") == list(range(39))
    with pytest.raises(Interrupted):
        process(log, stops_at=11)
    assert log[13:] == [10]
    assert rows_in(tmp_path / "results") == list(range(33))
    assert process(log)
    assert log[14:] == list(range(10, NUM_BATCHES))
    assert_complete(tmp_path)
    # Each attempt keeps its last checkpoint.
    [run] = (tmp_path / "paceline_runs").iterdir()
    assert len(DirectoryStorage(run / "checkpoints").list()) <= 3
    # Another run does not touch these results.
    with pytest.raises(
        ValueError, match="'results' holds the results of another run. Hint.*resume="
    ):
        process(log)
    assert rows_in(tmp_path / "results") == list(range(NUM_SAMPLES))


def test_a_run_that_is_to_make_room_stores_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log: list[int] = []

    class Stopped(make_processor(log)):  # type: ignore[misc]
        def on_checkpoint_start(self) -> None:
            if len(log) == 4:
                signal.raise_signal(signal.SIGTERM)

    options: Any = {"name": "inference", "output_dir": "results", "checkpoint_interval": 4}
    data: Any = torch.arange(NUM_SAMPLES)
    assert not pytorch.torch_batch_process(Stopped, data, BATCH_SIZE, **options)
    assert log == list(range(4))
    assert process(log, checkpoint_interval=9)
    assert log == list(range(NUM_BATCHES))
    assert_complete(tmp_path)


def test_what_has_changed_in_between_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted):
        process([], stops_at=6)
    with pytest.raises(ValueError, match="samples was 61 and is 60, batch_size was 3 and is 2"):
        process([], dataset=torch.arange(60), batch_size=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="'other' holds something else"):
        process([], output_dir="other")
    for given, message in ((tmp_path / "new", "/new' holds none"), (None, "none is given")):
        with pytest.raises(ValueError, match=f"results of the 5 batches .* but .*{message}. Hint"):
            process([], output_dir=given)
    (tmp_path / "results").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="'results' holds none.*`resume=None` processes all"):
        process([])
    (tmp_path / "moved").rename(tmp_path / "results")
    # What a user adds has other names.
    (tmp_path / "results" / "batches-all.txt").touch()
    log: list[int] = []
    # The limit may change, and results without a directory are the processor's own affair.
    assert process(log, max_batches=7)
    assert log == [5, 6]


def test_a_kill_while_the_directory_is_marked_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    marker = tmp_path / "results" / ".paceline-inference"
    with replacing_atomically(marker) as part:
        part.touch()
        part.with_name(f"{part.name}0").touch()
    marker.unlink()
    assert process([])
    assert_complete(tmp_path)


def test_a_run_without_a_directory_for_results_goes_on_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Processor(pytorch.TorchBatchProcessor):
        def __init__(self, context: TorchBatchProcessorContext) -> None:
            pass

        def process_batch(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 7 and stops:
                raise Interrupted

    def start(**options: Any) -> bool:
        return pytorch.torch_batch_process(Processor, torch.arange(30), 3, name="none", **options)

    monkeypatch.chdir(tmp_path)
    stops = True
    with pytest.raises(Interrupted):
        start(checkpoint_interval=5)
    stops = False
    with pytest.raises(ValueError, match="made without one, and 'results' is given"):
        start(output_dir="results")
    assert start()


@pytest.mark.parametrize("machine", ["here", "another"])
def test_results_on_another_machine_are_told_and_no_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: str,
) -> None:
    """Each machine may have a disk of its own, and a run goes on on another one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted):
        process([], stops_at=6)
    monkeypatch.setattr(_inference_progress.socket, "gethostname", lambda: machine)
    if machine == "another":
        (tmp_path / "results").rename(tmp_path / "moved")
    assert process([])
    told = f"Results of earlier batches are in 'results' on {HOST}."
    assert (told in caplog.text) == (machine == "another")


def test_what_a_reducer_cannot_keep_in_a_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Processor(pytorch.TorchBatchProcessor):
        def __init__(self, context: TorchBatchProcessorContext) -> None:
            self.seen = context.wrap_reducer(len, "seen")

        def process_batch(self, batch: Any, batch_idx: int) -> None:
            self.seen.update({batch_idx})

    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"reducers collect .* is a builtins\.set\. Hint.*`update`"):
        pytorch.torch_batch_process(Processor, torch.arange(30), 3, checkpoint_interval=1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` must be an integer of at least 1, but got 0"),
        ({"checkpoint_interval": True}, ValueError, "`checkpoint_interval` must be an integer"),
        ({"max_batches": 0}, ValueError, "`max_batches` must be an integer of at least 1"),
        ({"dataloader_kwargs": {"shuffle": True}}, ValueError, "but has shuffle"),
        ({"dataset": iter(())}, TypeError, "`dataset` must have `__len__`"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        process([], **options)
    with pytest.raises(TypeError, match="must be a subclass of TorchBatchProcessor, but got <clas"):
        pytorch.torch_batch_process(object, torch.arange(3))  # type: ignore[arg-type]


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = GUIDE.read_text().partition("```python\n")[2].partition("```")[0]
    exec(compile(code, str(GUIDE), "exec"), {"__name__": "__main__"})
    files = list((tmp_path / "predictions").rglob("*.pt"))
    assert sum(len(torch.load(path, weights_only=True)) for path in files) == 1000


# ---- several ranks -------------------------------------------------------------------------------


@pytest.fixture
def start(
    tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any
) -> Callable[..., int]:
    """Return a function that runs inference.py on some ranks, and returns its exit code.

    With options a launcher starts them; else they are forked.
    """

    def run(num_ranks: int, *options: str, **variables: str) -> int:
        environment = {**clean_environment, **variables, "OMP_NUM_THREADS": "1"}
        if options:
            launcher = ["paceline.launch.torch_distributed", "--nproc-per-node", str(num_ranks)]
            done = subprocess.run(
                [sys.executable, "-m", *launcher, *options, "--", str(SCRIPT)],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
        else:
            done = torch_ranks.run(num_ranks, SCRIPT, directory=tmp_path, environment=environment)
        print(done.stdout, done.stderr)
        return done.returncode

    return run


DIFFERING = """
import os, sys
import torch
from torch.utils.data import random_split
from paceline import pytorch

class Processor(pytorch.TorchBatchProcessor):
    def __init__(self, context):
        pass
    def process_batch(self, batch, batch_idx):
        print("PROCESSED")

odd, data = int(os.environ["RANK"] == sys.argv[1]), torch.arange(12)
part = random_split(data, [8, 4], generator=torch.Generator().manual_seed(odd))[0]
chosen = {"split": part, "samples": data.flip(0) if odd else data, "length": data[odd:]}
pytorch.torch_batch_process(Processor, chosen[sys.argv[2]], 2)
"""


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", ["split", "samples", "length"])
def test_data_that_depend_on_the_rank_are_refused_before_a_row_is_processed(
    tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any, what: str, odd: int
) -> None:
    (tmp_path / "script.py").write_text(DIFFERING)
    environment = {**clean_environment, "OMP_NUM_THREADS": "1"}
    script = tmp_path / "script.py", str(odd), what
    done = torch_ranks.run(3, *script, directory=tmp_path, environment=environment)
    said = done.stdout + (done.stderr or "")
    assert done.returncode != 0, said
    assert "The inference data must have the same samples on all ranks" in said
    assert f"those of rank {odd} are others" in said
    assert "check_ranks" not in said
    assert "PROCESSED" not in said


def processed(directory: Path) -> Counter[int]:
    return Counter(int(line.split()[0]) for line in (directory / "log").read_text().splitlines())


# Checkpoints of three ranks are at 6 and 12.
@pytest.mark.parametrize(
    ("rank", "batch", "next_ranks"),
    [
        (2, 14, 2),
        pytest.param(0, 12, 3, marks=pytest.mark.slow),
        pytest.param(2, 14, 3, marks=pytest.mark.slow),
        pytest.param(0, 15, 1, marks=pytest.mark.slow),
        pytest.param(0, 3, 2, marks=pytest.mark.slow),
    ],
)
def test_no_row_is_lost_or_doubled_after_the_kill_of_a_rank(
    start: Any, tmp_path: Path, rank: int, batch: int, next_ranks: int
) -> None:
    assert start(3, KILL=f"{rank} {batch}") != 0
    assert not (tmp_path / "finished").exists()
    assert start(next_ranks) == 0
    assert_complete(tmp_path)
    counts = processed(tmp_path)
    assert counts.keys() == set(range(NUM_BATCHES))
    # What a checkpoint counts is not done again.
    assert all(counts[number] == 1 for number in range(batch // 6 * 6))
    assert (tmp_path / "finished").exists()


@pytest.mark.long
@pytest.mark.parametrize(("rank", "batch"), [pytest.param(0, 15, marks=pytest.mark.slow), (2, 14)])
def test_results_that_are_gone_after_the_kill_of_a_rank_are_missed_on_all(
    start: Any, tmp_path: Path, rank: int, batch: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(3, KILL=f"{rank} {batch}") != 0
    (tmp_path / "results").rename(tmp_path / "moved")
    before = processed(tmp_path)
    assert start(2) != 0
    assert "'results' holds none. Hint: give what was given before" in "".join(capfd.readouterr())
    assert processed(tmp_path) == before
    (tmp_path / "moved").rename(tmp_path / "results")
    assert start(2) == 0
    assert_complete(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_take_turns(start: Any, tmp_path: Path, num_ranks: int) -> None:
    assert start(num_ranks, LOADERS="1") == 0
    assert_complete(tmp_path)
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len(lines) == NUM_BATCHES
    assert all(int(rank) == int(number) % num_ranks for number, rank, *_ in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank"),
    [("before_manifest", 0), ("after_manifest", 0), ("before_done", 0), ("before_done", 2)],
)
def test_a_kill_within_a_checkpoint_loses_no_row(
    start: Any, tmp_path: Path, point: str, rank: int
) -> None:
    fault = f"storage.{point}:3,signal=KILL,rank={rank}"
    assert start(3, PACELINE_FAULT=fault) != 0
    assert start(2) == 0
    assert_complete(tmp_path)


@pytest.mark.slow
def test_the_launcher_starts_ranks_again(start: Any, tmp_path: Path) -> None:
    fault = "inference.batch:5,signal=KILL,rank=2"
    assert start(3, "--max-restarts", "1", PACELINE_FAULT=fault) == 0
    assert_complete(tmp_path)


@pytest.mark.slow
def test_checkpoints_are_kept_in_an_object_store(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log: list[int] = []
    with pytest.raises(Interrupted):
        process(log, stops_at=13, checkpoint_storage=s3)
    assert process(log, checkpoint_storage=s3)
    assert log[13:] == list(range(10, NUM_BATCHES))
    assert_complete(tmp_path)
