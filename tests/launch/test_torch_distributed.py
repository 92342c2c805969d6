"""The launcher with real workers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._base import gpus as _visible_gpus
from paceline._base.gpus import KnownGpu
from paceline._base.process_and_network import num_cores
from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE, RunInfo
from paceline._training.workers import worker_generation as _generation
from paceline._training.workers.process_pools import ProgramPool, WorkerCommand
from paceline._training.workers.processes.process_facts_and_signals import read_process
from paceline._training.workers.processes.rank_environment import NodeLayout
from paceline._training.workers.worker_failures import WorkerFailedError
from paceline.journal import RunDirectory
from paceline.launch import torch_distributed
from paceline.launch._launcher_arguments import LaunchArgumentError

Launch = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]
Start = Callable[..., "subprocess.Popen[str]"]

DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("total", total.item())
"""


SEEN = """
import os, sys, time
print("loaded" if "tor" "ch" in sys.modules else "new", flush=True)
def others():
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = open(f"/proc/{name}/cmdline").read().split("\\0")
            parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if words[2:3] == ["template"] and int(parent) == os.getppid():
            yield name
while list(others()):
    time.sleep(0.01)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "num_workers", "warm", "seen"),
    [
        ("import torch", 2, "1", "loaded"),
        ("from paceline import core", 2, "1", "loaded"),
        ("import torch", 2, "0", "new"),
        ("import torch", 1, "1", "new"),
        ("import json", 2, "1", "new"),
    ],
)
def test_several_workers_of_a_script_that_names_torch_are_forks_from_the_start(
    launch: Launch, script: Script, code: str, num_workers: int, warm: str, seen: str
) -> None:
    """Torch is loaded once; its template ends when all have started, unless there are restarts."""
    name = script(f"{SEEN}\n{code}\n")
    done = launch("--nproc-per-node", str(num_workers), name, PACELINE_WARM=warm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(seen) == num_workers, f"{done.stdout} {done.stderr}"


def _is_alive(pid: int) -> bool:
    facts = read_process(pid)
    return facts is not None and not facts.is_zombie


def _wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline, "workers were left"
        time.sleep(0.02)


def _read_lines(process: "subprocess.Popen[str]", number: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(number)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_workers", "times"), [(2, 1), pytest.param(3, 30, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(600)
def test_workers_train_and_end_with_code_0_every_time(
    launch: Launch, script: Script, num_workers: int, times: int
) -> None:
    name = script(DDP)
    total = num_workers * (num_workers + 1) / 2
    for _ in range(times):
        result = launch(f"--nproc-per-node={num_workers}", "--", "python3", name)
        assert result.returncode == 0, result.stderr
        assert sorted(result.stdout.splitlines()) == [
            f"[rank={rank}] total {total}" for rank in range(num_workers)
        ]


@pytest.mark.long
def test_a_failing_rank_stops_those_that_hang_in_a_collective(
    launch: Launch, script: Script
) -> None:
    text = """
import signal, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("boom")
signal.pause()
"""
    result = launch("--nproc-per-node=3", "--grace-s", "0.5", script(text))
    assert result.returncode == 1
    assert "[rank=1] ValueError: boom" in result.stderr.splitlines()
    assert result.stderr.count("[rank=1] Traceback") == 1
    last = result.stderr.splitlines()[-1]
    assert last == (
        "ERROR: Rank 1 exited with code 1 (ValueError: boom), the first of 3 to fail; its output is"
        " above."
    )


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("raise ValueError('odd data\\nin shard 3')", "ValueError: odd data"),
        ("sys.exit('odd data\\nin shard 3')", "odd data"),
        ("exec('if True print()')", "SyntaxError: .*"),
    ],
)
def test_an_error_is_shown_in_full_once_and_then_by_its_first_line(
    launch: Launch, script: Script, rank: int, statement: str, line: str
) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '{rank}': {statement}\ntime.sleep(600)"
    result = launch("--nproc-per-node=3", "--grace-s", "0", script(text))
    assert re.search(rf"Rank {rank} exited with code 1 \({line}\), the first", result.stderr)
    assert result.stderr.splitlines().count(f"[rank={rank}] in shard 3") == ("shard" in statement)


def test_a_killed_worker_is_named_with_its_signal(launch: Launch, script: Script) -> None:
    text = "import os, time\nif os.environ['RANK'] == '2': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    result = launch("--nproc-per-node=3", script(text))
    assert result.returncode == 137
    assert "Rank 2 was ended by SIGKILL, the first of 3 to fail" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends workers with their parent")
def test_nothing_that_workers_started_is_left_when_the_launcher_is_killed(
    start_launcher: Start, script: Script
) -> None:
    text = """
import os, signal, subprocess, time
signal.signal(15, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
# It holds none of the streams that end with the worker.
away = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=-3, stderr=-3)
print(os.getpid(), child.pid, away.pid)
time.sleep(600)
"""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander:
        launcher = start_launcher("--nproc-per-node=3", script(text))
        pids = [int(pid) for line in _read_lines(launcher, 3) for pid in line.split()[1:]]
        assert len(pids) == 9
        assert all(map(_is_alive, pids))
        launcher.kill()
        _wait_until_ended(pids)
        assert bystander.poll() is None
        bystander.kill()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_forwarded_and_the_workers_answer_counts(
    start_launcher: Start, script: Script, signum: signal.Signals
) -> None:
    text = f"""
import signal, sys, time
def leave(*_):
    print("saved")
    sys.exit(0)
signal.signal({int(signum)}, leave)
print("up")
while True:
    # `signal.pause` would miss one that comes just before it.
    time.sleep(0.05)
"""
    launcher = start_launcher("--nproc-per-node=2", script(text))
    assert sorted(_read_lines(launcher, 2)) == ["[rank=0] up", "[rank=1] up"]
    launcher.send_signal(signum)
    out, _ = launcher.communicate(timeout=240)
    assert sorted(out.splitlines()) == ["[rank=0] saved", "[rank=1] saved"]
    assert launcher.returncode == 0


def test_workers_that_do_not_expect_a_signal_end_by_it(
    start_launcher: Start, script: Script
) -> None:
    launcher = start_launcher(script("import time\nprint('up')\ntime.sleep(600)"))
    _read_lines(launcher, 1)
    launcher.terminate()
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 143
    assert "Rank 0 was ended by SIGTERM" in err


def test_a_second_sigterm_kills_workers_that_ignore_it(
    start_launcher: Start, script: Script
) -> None:
    text = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("ignored"))
print("up")
while True:
    # `signal.pause` would miss one that comes just before it.
    time.sleep(0.05)
"""
    launcher = start_launcher("--nproc-per-node=2", script(text))
    _read_lines(launcher, 2)
    launcher.terminate()
    assert sorted(_read_lines(launcher, 2)) == ["[rank=0] ignored", "[rank=1] ignored"]
    launcher.terminate()
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 137
    assert "SIGTERM again: the workers are killed." in err


@pytest.mark.long
@pytest.mark.parametrize("leaves", [True, False])
def test_a_second_ctrl_c_ends_the_workers_with_code_130(
    start_launcher: Start, script: Script, leaves: bool
) -> None:
    text = f"""
import signal, time
def note(*_):
    print("noted")
    signal.signal(signal.SIGINT, signal.default_int_handler if {leaves} else signal.SIG_IGN)
signal.signal(signal.SIGINT, note)
print("up")
while True:
    # `signal.pause` would miss one that comes just before it.
    time.sleep(0.05)
"""
    launcher = start_launcher("--nproc-per-node=2", script(text))
    _read_lines(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    assert sorted(_read_lines(launcher, 2)) == ["[rank=0] noted", "[rank=1] noted"]
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 130
    assert ("KeyboardInterrupt" if leaves else "ended by SIGKILL") in err.splitlines()[-1]


def test_the_failure_of_which_another_rank_tells_is_named(launch: Launch, script: Script) -> None:
    text = """
import os, time
class PeerError(RuntimeError):
    is_consequence = True
if os.environ["RANK"] == "0":
    # It tells of a failure that soon follows, however late the other one begins.
    while not os.path.exists("up"):
        time.sleep(0.01)
    open("raises", "w").close()
    raise PeerError("rank 1 has failed")
open("up", "w").close()
while not os.path.exists("raises"):
    time.sleep(0.01)
time.sleep(0.3)
raise ValueError("boom")
"""
    result = launch("--nproc-per-node=2", script(text))
    assert "Rank 1 exited with code 1 (ValueError: boom)" in result.stderr.splitlines()[-1]


def test_the_children_of_a_worker_are_not_signalled(start_launcher: Start, script: Script) -> None:
    text = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "0.5"])
def leave(*_):
    print("child", child.wait())
    sys.exit(0)
signal.signal(signal.SIGUSR1, leave)
print("up")
while True:
    time.sleep(0.05)
"""
    launcher = start_launcher(script(text))
    _read_lines(launcher, 1)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.communicate(timeout=240)[0] == "child 0\n"


def test_each_rank_is_told_its_place(launch: Launch, script: Script) -> None:
    text = """
import json, os
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
         "NODE_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
print(json.dumps([os.environ[name] for name in names]))
print(os.environ["MASTER_PORT"])
"""
    result = launch(
        "--nproc_per_node", "2", script(text), OMP_NUM_THREADS="8", PACELINE_THREADS="8"
    )
    lines = dict.fromkeys(sorted(result.stdout.splitlines()))
    places = [json.loads(line.split(maxsplit=1)[1]) for line in lines if line.endswith("]")]
    shared = ["2", "0", "1", "0", "127.0.0.1", "4"]
    assert places == [[str(r), "2", str(r), *shared] for r in range(2)]
    assert len({line.split()[1] for line in lines if not line.endswith("]")}) == 1


def test_any_command_can_be_a_worker(launch: Launch) -> None:
    result = launch("--nproc-per-node=2", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"; exit 0')
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[rank=0] 0 of 2", "[rank=1] 1 of 2"]


def test_a_command_that_does_not_exist_ends_with_127(launch: Launch) -> None:
    result = launch("no-such-program")
    assert result.returncode == 127
    assert "the command 'no-such-program' was not found" in result.stderr


def test_a_program_that_has_ended_before_its_launcher_looks_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the launcher may look that late."""

    def wait_late(wait: Callable[[float], bool], seconds: float) -> bool:
        time.sleep(2)
        return wait(seconds)

    monkeypatch.setattr(_generation, "wait_until", wait_late)
    pool = ProgramPool(
        WorkerCommand(arguments=("sh", "-c", "exit 7"), is_python=False),
        lambda num_workers: NodeLayout(num_local_workers=num_workers, master_port=1),
        lambda: 1,
        environment={},
        on_line=lambda line: None,
        heartbeat_timeout_s=30.0,
        collective_timeout_s=30.0,
        grace_s=5.0,
    )
    pool.start()
    with pytest.raises(WorkerFailedError, match="exit code 7|code 7"):
        pool.program.wait()
    pool.shutdown()


def test_the_states_of_progress_bars_are_thinned_out_and_keep_their_rank(
    launch: Launch, script: Script
) -> None:
    text = """
import time
for step in range(200):
    print(f"\\r{step}/199", end="", flush=True)
    time.sleep(0.003)
print()
"""
    result = launch("--nproc-per-node=2", script(text))
    for rank in (0, 1):
        lines = [line for line in result.stdout.splitlines() if line.startswith(f"[rank={rank}]")]
        assert lines[-1] == f"[rank={rank}] 199/199"
        # Two a second, for as long as it takes.
        assert 2 <= len(lines) <= 100


def test_the_output_of_a_single_worker_is_left_as_it_is(launch: Launch, script: Script) -> None:
    result = launch(script("import sys; sys.stdout.buffer.write(b'\\r10%\\r20% \\x1b[1mx')"))
    # Universal newlines of the reader turn the carriage returns into line ends.
    assert result.stdout == "\n10%\n20% \x1b[1mx"


def test_slots_that_are_held_are_the_default_number_of_workers(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    info = RunInfo(run_id="r", name="n", created=0.0, checkpoint_storage="/c", slot_ids=[3, 5])
    run = RunDirectory.create(tmp_path / "run", info)
    before = sorted(os.listdir(run.path))
    text = "import os; print(os.environ['WORLD_SIZE'])"
    result = launch(script(text), **{RUN_DIRECTORY_VARIABLE: str(run.path)})
    assert sorted(result.stdout.splitlines()) == ["[rank=0] 2", "[rank=1] 2"]
    # Nothing of the launcher stays in the run directory.
    assert sorted(os.listdir(run.path)) == before


def test_a_run_directory_that_is_none_is_refused(launch: Launch, script: Script) -> None:
    result = launch(script(""), **{RUN_DIRECTORY_VARIABLE: "/nonexistent"})
    assert result.returncode == 2
    assert "/nonexistent" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "empty script"),
        (["--nproc-per-node", "2", "--"], "empty script"),
        (["--rdzv-backend=c10d", "train.py"], "`--rdzv-backend` is not offered yet"),
        (["--", "--trial", "mod:Class"], "`--trial module:Class` is not offered"),
        (["missing.py"], "no file 'missing.py'"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(
    launch: Launch, arguments: list[str], text: str
) -> None:
    result = launch(*arguments)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_refused(launch: Launch, script: Script) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = launch(f"--master-port={port}", script(""))
    assert result.returncode == 2
    assert f"{port} is taken" in result.stderr


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_distributed.main(["--help"]) == 0
    assert "--nproc-per-node" in capsys.readouterr().out


@pytest.mark.parametrize("wanted", [9999, (9999, 99999)])
def test_far_more_workers_than_cores_are_refused(wanted: int | tuple[int, int]) -> None:
    with pytest.raises(LaunchArgumentError, match="is too large. .* but 9999 are asked for"):
        torch_distributed._worker_limits(wanted, 1)


@pytest.mark.parametrize(
    ("visible", "number"),
    [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-a,GPU-b", 2), ("0,1,2,3", 3), (None, 3)],
)
def test_visible_gpus_are_counted_without_torch(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, number: int
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    gpus = [KnownGpu(id=str(number), number=str(number)) for number in range(3)]
    monkeypatch.setattr(_visible_gpus, "_found", gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert torch_distributed._num_workers("auto") == (number or num_cores())
    if number:
        assert torch_distributed._num_workers("gpu") == number
    else:
        with pytest.raises(LaunchArgumentError, match="none that is visible"):
            torch_distributed._num_workers("gpu")


def test_the_launcher_loads_no_heavy_package() -> None:
    code = (
        "import sys, paceline.launch.torch_distributed\n"
        "print({'torch', 'numpy', 'psutil', 'msgspec', 'pydantic'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
