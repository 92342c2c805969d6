"""Training on several processes of one machine, however they are started and ended."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import core, pytorch
from paceline._training.workers.worker_failures import ResourcesError, WorkerFailedError

Start = Callable[..., Any]

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from paceline import pytorch

LENGTH, PAUSE_S = int(os.environ.get("LENGTH", 6)), float(os.environ.get("PAUSE_S", 0))
LOADERS = int(os.environ.get("LOADERS", 0))
FAULT, RANK = os.environ.get("FAULT"), int(os.environ.get("RANK", 0))

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context, self.num_batches = context, 0
        self.model = context.wrap_model(nn.Linear(4, 2))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(sgd)
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.num_batches += 1
        if self.num_batches == 4 and PAUSE_S:
            # As one piece, or the lines of two ranks may mix.
            print(f"READY {os.getpid()}\\n", end="", flush=True)
        if batch_idx >= 3:
            time.sleep(PAUSE_S)
        if FAULT == "raise" and batch_idx == 3 and RANK == 1:
            raise ZeroDivisionError("boom")
        loss = self.model(batch[0]).pow(2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        if FAULT == "kill" and RANK == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": self.model(batch[0]).pow(2).mean()}
    def build_training_data_loader(self):
        num_samples = int(os.environ.get("SAMPLES", 32))
        numbers = torch.arange(4.0 * num_samples).reshape(num_samples, 4) / 128
        data = torch.utils.data.TensorDataset(numbers)
        method = os.environ.get("METHOD")
        return torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=LOADERS, multiprocessing_context=method
        )
    build_validation_data_loader = build_training_data_loader
    def build_callbacks(self):
        return {"slow": SlowDisk()} if FAULT == "slow disk" else {}

class SlowDisk(pytorch.PyTorchCallback):
    def on_checkpoint_write_end(self, checkpoint_dir):
        print("WRITING\\n", end="", flush=True)
        time.sleep(600)

def main(wrap=lambda model: model):
    with pytorch.init(hparams={"global_batch_size": 4}, seed=1, resume="auto") as context:
        trial = Trial(context)
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(LENGTH))
        done = f"RESULT {result.stop_reason} {result.steps_completed}\\n"
        print(done, end="", flush=True)
        return context.distributed.rank, wrap(trial.model), result.steps_completed

if __name__ == "__main__":
    if sys.argv[1:]:
        pytorch.launch(main, int(sys.argv[1]))
    else:
        main()
"""

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node")
COMMANDS = {
    "alone": ["train.py"],
    "launcher": ["-m", "paceline.launch.torch_distributed", "--nproc-per-node=2", "train.py"],
    "function": ["train.py", "2"],
    "torchrun": [*TORCHRUN, "2", "train.py"],
}


@pytest.fixture
def environment(clean_environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a user's shell."""
    return {**clean_environment, "OMP_NUM_THREADS": "1", "USE_TORCH_DISTRIBUTED": "True"}


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str], torch_ranks: Any) -> Iterator[Start]:
    """Return a function that starts a command as a terminal does, output and errors in one.

    A script alone is forked from a process that has torch loaded.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    started: list[Any] = []

    def begin(*command: str, **variables: object) -> Any:
        own = {**environment, **{name: str(value) for name, value in variables.items()}}
        if command[0].endswith(".py"):
            process = torch_ranks.start(
                str(tmp_path / command[0]), *command[1:], directory=tmp_path, environment=own,
                has_session=True, is_one_stream=True,
            )  # fmt: skip
        else:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=tmp_path,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        # Of a child it closes nothing.
        process.kill()
        process.wait()
        process.stdout.close()


def read_until(process: Any, text: str, number: int = 1) -> list[str]:
    """Return the lines that hold a text, once there are so many."""
    lines, found = [], []
    for line in process.stdout:
        lines.append(line)
        found += [line] if text in line else []
        if len(found) == number:
            return found
    raise AssertionError("".join(lines))


def run_summary(tmp_path: Path) -> core.RunSummary:
    (summary,) = core.list_runs(tmp_path / "paceline_runs")
    return summary


# ---- a function ------------------------------------------------------------------------------


@pytest.mark.long
def test_a_function_trains_on_workers_and_its_errors_are_those_of_the_first_rank(
    start: Start, tmp_path: Path
) -> None:
    code = """
    import torch
    import train
    from paceline import pytorch
    from torch.nn.parallel import DistributedDataParallel

    def fail():
        with pytorch.init(hparams={"global_batch_size": 4}) as context:
            if context.distributed.rank == 1:
                raise ZeroDivisionError("boom")
            context.distributed.broadcast(None)

    values = pytorch.launch(train.main, 2, kwargs={"wrap": DistributedDataParallel})
    assert [(rank, type(model), steps) for rank, model, steps in values] == [
        (0, torch.nn.Linear, 6), (1, torch.nn.Linear, 6)
    ]
    (_, first, _), (_, second, _) = values
    assert torch.equal(first.weight, second.weight)
    assert torch.isfinite(first(torch.ones(4))).all()
    try:
        pytorch.launch(fail, 2)
    except ZeroDivisionError as error:
        assert "Rank 1 raised, the first of 2 to fail" in str(error.__cause__), error.__cause__
        print("PASSED")
    """
    (tmp_path / "driver.py").write_text(textwrap.dedent(code))
    process = start("driver.py")
    out, _ = process.communicate(timeout=240)
    assert out.endswith("PASSED\n"), out
    assert out.count("RESULT reached max_length 6") == 2


@pytest.mark.parametrize(
    ("main", "num_workers", "error", "match"),
    [
        (3, 2, TypeError, "`main` must be a function, but got int"),
        (print, 0, ValueError, "`num_workers` must be at least 1, but got 0"),
        (print, "2", TypeError, "`num_workers` must be an integer, but got '2'"),
        (print, True, TypeError, "`num_workers` must be an integer, but got True"),
    ],
)
def test_wrong_arguments_are_refused(
    main: Any, num_workers: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        pytorch.launch(main, num_workers)


def test_far_more_processes_than_cores_are_refused_before_any_starts() -> None:
    with pytest.raises(ResourcesError, match="but 9999 are asked for"):
        pytorch.launch(print, 9999)


def test_a_worker_launches_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="this is one of 4 workers of torchrun"):
        pytorch.launch(print, 2)


def test_workers_without_valid_hyperparameters_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        with pytorch.init(hparams={"lr": -1}):
            raise core.InvalidHP("lr is negative")

    monkeypatch.chdir(tmp_path)
    assert pytorch.launch(main, 2) == [None, None]
    (run,) = core.list_runs(tmp_path / "paceline_runs")
    assert run.state is core.RunState.INVALID_HP


def test_a_killed_worker_is_a_runtime_error() -> None:
    assert issubclass(WorkerFailedError, RuntimeError)
    with pytest.raises(WorkerFailedError, match="Rank 0 was ended by SIGKILL"):
        pytorch.launch(signal.raise_signal, 1, args=(int(signal.SIGKILL),))


CELLS = [
    """
import time
from paceline import pytorch
FACTOR = 3
class Point:
    def __init__(self, x):
        self.x = x
def main(base, what="return"):
    with pytorch.init(hparams={"global_batch_size": 4}) as context:
        rank = context.distributed.rank
        if what == "wait":
            print("waiting" if rank == 0 else "")
            time.sleep(600)
        print("hello from", context.distributed.allgather(rank))
        return Point(base + FACTOR * rank)
""",
    "print([isinstance(p, Point) and p.x for p in pytorch.launch(main, 2, args=(1,))])",
    "pytorch.launch(main, 2, args=(1, 'wait'))",
]
NOTEBOOK = """
import json, sys
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(startup_timeout=200)

def execute(code):
    shown = []
    def show(message):
        shown.append(message["content"].get("text", ""))
        if "waiting" in shown[-1]:
            manager.interrupt_kernel()
    reply = client.execute_interactive(code, timeout=240, output_hook=show)
    return reply["content"].get("ename"), sorted("".join(shown).splitlines())

print(json.dumps([execute(cell) for cell in json.loads(sys.argv[1])]))
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.mark.long
def test_functions_of_a_notebook_run_in_workers_and_its_cells_can_be_interrupted(
    start: Start, tmp_path: Path
) -> None:
    reason = "NOT TESTED: notebooks need ipykernel and jupyter_client"
    pytest.importorskip("ipykernel", reason=reason)
    pytest.importorskip("jupyter_client", reason=reason)
    process = start("-c", NOTEBOOK, json.dumps(CELLS))
    out, _ = process.communicate(timeout=240)
    _, (error, shown), interrupted = json.loads(out.splitlines()[-1])
    assert error is None
    # The end of the run is shown on another stream, so before or after it.
    assert shown[0] == "[1, 4]"
    assert "[rank=0] hello from [0, 1]" in shown
    assert interrupted[0] == "KeyboardInterrupt"
    assert {run.name for run in core.list_runs(tmp_path / "paceline_runs")} == {"notebook"}


# ---- Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("alone", 0),
        ("function", 0),
        # torchrun calls any Ctrl-C a failure.
        pytest.param("torchrun", 1, marks=pytest.mark.slow),
        pytest.param("launcher", 0, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_stores_a_checkpoint_and_the_run_goes_on_later(
    start: Start, tmp_path: Path, how: str, code: int
) -> None:
    num_workers = 1 if how == "alone" else 2
    # The processes of a data loader are in the foreground group as well.
    loaders = 2 if how == "alone" else 0
    process = start(*COMMANDS[how], LENGTH=100_000, PAUSE_S=0.01, LOADERS=loaders)
    read_until(process, "READY", num_workers)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == code, out
    assert out.count("press Ctrl-C again to leave now") == 1
    assert out.count("RESULT interrupted") == num_workers
    summary = run_summary(tmp_path)
    assert summary.state is core.RunState.PREEMPTED
    assert summary.latest_checkpoint is not None
    if how == "alone":
        process = start(*COMMANDS[how], LENGTH=2000)
        out, _ = process.communicate(timeout=240)
        assert "RESULT reached max_length 2000" in out
        assert run_summary(tmp_path).num_attempts == 2


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("fork", signal.SIGTERM),
        pytest.param("spawn", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("forkserver", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("fork", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_all_processes_of_a_job_stores_a_checkpoint(
    start: Start, tmp_path: Path, method: str, number: signal.Signals
) -> None:
    # The second time training begins in the middle of an epoch.
    for num_attempts in (1, 2):
        options = {"LENGTH": 1500, "SAMPLES": 8000, "PAUSE_S": 0.05}
        process = start("train.py", **options, LOADERS=2, METHOD=method)
        read_until(process, "READY")
        os.killpg(process.pid, number)
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, out
        assert "is killed by signal" not in out
        summary = run_summary(tmp_path)
        assert summary.state is core.RunState.PREEMPTED
        assert summary.num_attempts == num_attempts
        assert summary.latest_checkpoint is not None


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code"),
    [
        # A shell shows the end by SIGINT as 130.
        pytest.param("alone", -signal.SIGINT, marks=pytest.mark.slow),
        ("launcher", 130),
        pytest.param("function", -signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("torchrun", 1, marks=pytest.mark.slow),
    ],
)
def test_a_second_ctrl_c_leaves_at_once(start: Start, tmp_path: Path, how: str, code: int) -> None:
    process = start(*COMMANDS[how], PAUSE_S=600)
    ready = read_until(process, "READY", 1 if how == "alone" else 2)
    os.killpg(process.pid, signal.SIGINT)
    read_until(process, "press Ctrl-C again to leave now")
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == code, out
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{line.split()[-1]}").exists() for line in ready):
        assert time.monotonic() < deadline, "a worker went on"
        time.sleep(0.05)
    # torchrun kills its workers before they can say more.
    ended = core.RunState.CRASHED if how == "torchrun" else core.RunState.PREEMPTED
    assert run_summary(tmp_path).state is ended


def test_a_second_ctrl_c_does_not_wait_for_a_checkpoint(start: Start, tmp_path: Path) -> None:
    process = start(*COMMANDS["alone"], LENGTH=100_000, PAUSE_S=0.01, FAULT="slow disk")
    read_until(process, "READY")
    process.send_signal(signal.SIGINT)
    read_until(process, "WRITING")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGINT, out
    summary = run_summary(tmp_path)
    assert summary.state is core.RunState.PREEMPTED
    assert summary.latest_checkpoint is None


# ---- torchrun --------------------------------------------------------------------------------

OVERLAPPED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from paceline import pytorch

def main():
    with pytorch.init(hparams={"global_batch_size": 8}, seed=1) as context:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(30):
            model(torch.ones(8, 64)).pow(2).mean().backward()
            sgd.step()
            sgd.zero_grad()
        sums = context.distributed.allgather(sum(p.sum().item() for p in model.parameters()))
        assert len(sums) == dist.get_world_size() and len(set(sums)) == 1, sums
        print("DONE", flush=True)
    return model

if "exit" in sys.argv:
    sys.exit(main() and int(sys.argv[-1]))
model = main()
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_workers", "repetitions"),
    [
        (2, 1),
        pytest.param(3, 30, marks=pytest.mark.slow),
        pytest.param(4, 30, marks=pytest.mark.slow),
    ],
)
def test_under_plain_torchrun_good_work_ends_with_code_0_every_time(
    start: Start, tmp_path: Path, num_workers: int, repetitions: int
) -> None:
    (tmp_path / "overlapped.py").write_text(OVERLAPPED)
    ends = [[], ["exit", "0"]]
    for repetition in range(repetitions):
        end = ends[repetition % 2]
        process = start(*TORCHRUN, str(num_workers), "overlapped.py", *end)
        out, _ = process.communicate(timeout=240)
        assert (process.returncode, out.count("DONE")) == (0, num_workers), out


@pytest.mark.slow
def test_under_plain_torchrun_a_code_of_the_script_is_kept(start: Start, tmp_path: Path) -> None:
    (tmp_path / "overlapped.py").write_text(OVERLAPPED)
    process = start(*TORCHRUN, "2", "overlapped.py", "exit", "3")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "exitcode  : 3" in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        pytest.param("raise", "ZeroDivisionError: boom", marks=pytest.mark.slow),
        # Rank 1 has taken SIGTERM for a preemption, and waits where no connection breaks.
        ("kill", "the process of rank 0 has ended without a word"),
    ],
)
def test_under_plain_torchrun_a_rank_that_fails_ends_the_others(
    start: Start, fault: str, text: str
) -> None:
    process = start(*COMMANDS["torchrun"], FAULT=fault)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert text in out
    # It did not take torchrun's own kill, half a minute later.
    assert "Unable to shutdown process" not in out


# ---- the process group -----------------------------------------------------------------------


@pytest.mark.long
def test_a_process_group_is_joined_or_made_for_every_way_to_tell_the_place(
    start: Start, tmp_path: Path
) -> None:
    code = """
    import os
    import torch.distributed as dist
    from paceline import core, pytorch
    from paceline._base.process_and_network import PortReservation


    def place(**settings):
        with pytorch.init(hparams={"global_batch_size": 4}, name="x", **settings) as context:
            distributed = context.distributed
            assert dist.get_world_size() == distributed.size == 2
            assert dist.get_rank() == distributed.rank
            return (distributed.allgather(distributed.rank), distributed.local_rank,
                    distributed.cross_size)

    def main(port):
        rank = int(os.environ["RANK"])
        found = []
        seed = core.DistributedContext.from_torch_distributed(chief_ip="localhost")
        found.append(place(distributed=seed))
        dist.destroy_process_group()
        for name in [n for n in os.environ if n.endswith(("RANK", "WORLD_SIZE"))]:
            del os.environ[name]
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        built = core.DistributedContext(
            rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1,
            chief_ip="127.0.0.1", chief_port=port,
        )
        found.append(place(distributed=built))
        group = dist.group.WORLD
        found.append(place())
        assert dist.group.WORLD is group
        # As scripts do that map another launcher's variables to those of torch.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port)}
        found.append(place())
        return found

    if __name__ == "__main__":
        with PortReservation() as reservation:
            print("PLACES", pytorch.launch(main, 2, args=(reservation.port,)))
    """
    (tmp_path / "places.py").write_text(textwrap.dedent(code))
    process = start("places.py")
    out, _ = process.communicate(timeout=240)
    places = [[([0, 1], rank, 1)] * 4 for rank in range(2)]
    assert f"PLACES {places}" in out, out


def test_the_variable_of_an_older_launcher_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USE_TORCH_DISTRIBUTED", "True")
    with pytorch.init(hparams={"global_batch_size": 4}) as context:
        assert context.distributed.size == 1


def test_a_drawn_seed_is_that_of_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(KeyError, match="lost"),
        pytorch.init(hparams={"global_batch_size": 4}, name="a") as first,
    ):
        raise KeyError("lost")
    with pytorch.init(hparams={"global_batch_size": 4}, name="a", resume="auto") as second:
        assert second.get_trial_seed() == first.get_trial_seed()


# ---- a long validation -------------------------------------------------------------------------

LONG_VALIDATION = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
from paceline import core, pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_full_dataset(self, data_loader):
        time.sleep(6)
        return {"error": 1.5}
    def build_training_data_loader(self):
        return DataLoader(TensorDataset(torch.ones(8, 1)))
    build_validation_data_loader = build_training_data_loader

distributed = core.DistributedContext.from_torch_distributed(timeout_s=3.0)
with pytorch.init(
    hparams={"global_batch_size": 2}, distributed=distributed, num_shards=2
) as context:
    result = pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(3))
    print(result.metrics["error"], distributed.timeout_s)
"""


@pytest.mark.slow
def test_a_validation_on_the_chief_may_take_longer_than_ranks_wait(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LONG_VALIDATION)
    process = start("-m", "paceline.launch.torch_distributed", "--nproc-per-node=3", "train.py")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert [out.count(f"[rank={rank}] 1.5 3.0") for rank in range(3)] == [1, 1, 1]
    # A rank without a shard says so.
    assert out.count("Rank 2 idles") == 1
