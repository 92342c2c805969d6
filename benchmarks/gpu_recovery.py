"""Part of `gpu.py`: from the SIGKILL of a training process to its next step.

Paceline's launcher starts the process again, which goes on from its last checkpoint; the state is
on the device.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BEGAN = time.time()

_MEGABYTES = {"cuda": (1_000, 10_000), "cpu": (10, 20)}
_PERIOD, _NUM_BATCHES = 10, 100_000
# Until a checkpoint that is stored is recorded as well.
_SETTLE_S = 0.3
_POLL_S = 0.005
# To tell what there was no time for, and to end the launcher.
_ENDING_S = 4.0
_BATCH_S = 0.02
_TIMES_VARIABLE = "PACELINE_GPU_TIMES"


def main() -> None:
    """Measure all sizes while there is time."""
    from gpu_machine import part_arguments
    from gpu_record import leave_out

    parser = part_arguments(__doc__)
    parser.add_argument("--size", type=int, help="this size alone, counted from 0")
    parser.add_argument("--child", type=int, metavar="MEGABYTES")
    given = parser.parse_args()
    if given.child:
        train(given.child * 10**6, given.device)
        return
    deadline = time.monotonic() + given.seconds - _ENDING_S
    sizes = _MEGABYTES[given.device]
    for num_megabytes in sizes if given.size is None else sizes[given.size :][:1]:
        left_s = deadline - time.monotonic()
        if left_s < 10:
            leave_out(f"SIGKILL with {num_megabytes:,} MB of state", f"{left_s:.0f} s are left")
            continue
        try:
            with tempfile.TemporaryDirectory() as directory:
                measure(num_megabytes, given.device, Path(directory), deadline)
        except TimeoutError as error:
            leave_out(f"SIGKILL with {num_megabytes:,} MB of state", str(error))


def measure(num_megabytes: int, device: str, directory: Path, deadline: float) -> None:
    """Kill a training once it has a checkpoint, and tell how long its next step takes."""
    from gpu_record import tell

    times_path = directory / "times.jsonl"
    command = [sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node=1"]
    command += ["--max-restarts=1", __file__, "--child", str(num_megabytes), "--device", device]
    with (directory / "log").open("w+b") as log:
        launcher = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | {_TIMES_VARIABLE: str(times_path)},
            stdout=log,
            stderr=log,
        )
        try:
            _wait(lambda: any(directory.rglob("manifest.json")), launcher, deadline, log)
            time.sleep(_SETTLE_S)
            pid = _notes(times_path)[0]["pid"]
            killed = time.time()
            os.kill(pid, signal.SIGKILL)
            _wait(lambda: _has_stepped(times_path, pid), launcher, deadline, log)
        finally:
            # A signal to end would have it store all of its state once more.
            launcher.kill()
            launcher.wait()
    at = {note["event"]: note["time"] - killed for note in _notes(times_path) if note["pid"] != pid}
    parts = ("started", "imported", "made", "read", "step")
    told = "; ".join(f"{name} after {at[name]:.2f} s" for name in parts if name in at)
    tell(f"SIGKILL to the next step, {num_megabytes:,} MB of state", f"{at['step']:.2f} s", told)


def _wait(is_so: Callable[[], bool], launcher: Any, deadline: float, log: Any) -> None:
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the time ran out")
        if launcher.poll() is not None:
            log.seek(0)
            text = log.read().decode(errors="replace")
            raise RuntimeError(f"The training must go on, but it has ended:\n{text}")
        time.sleep(_POLL_S)


def _notes(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if "\n" in line]


def _has_stepped(path: Path, killed: int) -> bool:
    return any(note["event"] == "step" for note in _notes(path) if note["pid"] != killed)


# ---- the training ----------------------------------------------------------------------------


def note(event: str, at: float | None = None) -> None:
    """Write down when something happened."""
    line = {"pid": os.getpid(), "event": event, "time": time.time() if at is None else at}
    with open(os.environ[_TIMES_VARIABLE], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def train(num_bytes: int, device: str) -> None:
    """Train a state of so many bytes until killed."""
    note("started", _BEGAN)
    import torch
    from save_ways import transformer_weights, warm_adam
    from torch.utils.data import DataLoader, TensorDataset

    from paceline import pytorch

    note("imported")

    class Noting(pytorch.PyTorchCallback):
        def on_checkpoint_load_start(self, checkpoint: Any) -> None:
            note("read")

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            parts = {
                "large": transformer_weights(num_bytes, device),
                "small": torch.nn.Linear(4, 1),
            }
            self.model = context.wrap_model(torch.nn.ModuleDict(parts))
            self.optimizer = context.wrap_optimizer(warm_adam(self.model))
            self.has_stepped = False

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.model["small"](batch[0]).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            if not self.has_stepped:
                self.has_stepped = True
                # It counts once the device has taken it.
                loss.item()
                note("step")
            time.sleep(_BATCH_S)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": self.model["small"](batch[0]).mean()}

        def build_training_data_loader(self) -> Any:
            return DataLoader(TensorDataset(torch.randn(_NUM_BATCHES, 4)))

        def build_validation_data_loader(self) -> Any:
            return DataLoader(TensorDataset(torch.randn(1, 4)))

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"noting": Noting()}

    hparams = {"global_batch_size": 1}
    with pytorch.init(hparams=hparams, seed=1, name="bench", device=device) as context:
        trial = Trial(context)
        note("made")
        # A training that goes on need not store its next state as well.
        is_first = context.core.latest_checkpoint is None
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(_NUM_BATCHES),
            checkpoint_period=pytorch.Batch(_PERIOD if is_first else _NUM_BATCHES),
        )


if __name__ == "__main__":
    main()
