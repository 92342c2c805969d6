"""Part of `gpu.py`: the gradients of two ranks, summed after and during the backward pass.

Both ranks share one GPU, which NCCL refuses, so they meet over gloo: what this shows is that the
sums are right and nothing hangs, and not how fast they are on GPUs of their own.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WAYS = ("flat", "overlapped")
_NUM_STEPS = {"cuda": 16, "cpu": 12}
_NUM_WARM = 5
_NUM_RANKS = 2
# Of the size of each parameter, after sums in another order.
_MOST_APART = 1e-3


def main() -> None:
    """Train by each way, and compare."""
    from gpu_machine import part_arguments
    from gpu_record import check, leave_out, tell

    parser = part_arguments(__doc__)
    parser.add_argument("--child", choices=_WAYS)
    given = parser.parse_args()
    if given.child:
        train(given.child, given.device)
        return
    results = {}
    for way in _WAYS:
        options = ["--child", way, "--device", given.device]
        ranks, log = launch(__file__, options, given.seconds)
        results[way] = ranks
        are_alike = ranks[0]["weights"] == ranks[1]["weights"]
        told = [line for line in log.splitlines() if "NCCL needs" in line]
        check(
            f"two ranks, {way}: the same weights on both",
            are_alike,
            result=f"{ranks[0]['step_ms']:.1f} ms a step",
            why=told[0] if told else f"backend: {ranks[0]['backend']}",
        )
    pairs = zip(results["flat"][0]["weights"], results["overlapped"][0]["weights"], strict=True)
    apart = max(abs(one - other) / max(one, other) for one, other in pairs if one != other or one)
    check(
        "flat and overlapped: the same sums but for their order",
        apart <= _MOST_APART,
        result=f"{apart:.1e} of a parameter's size apart at most",
        bar=f"<= {_MOST_APART:.0e}",
    )
    if given.device == "cuda":
        tell("NCCL with two ranks on one GPU", "-", "NCCL refuses ranks that share a GPU")
        leave_out("NCCL with several ranks", "it needs as many GPUs")


def launch(script: str, options: list[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Run a script on two ranks; return what each has written to its file, and the log."""
    command = [sys.executable, "-m", "paceline.launch.torch_distributed"]
    command += [f"--nproc-per-node={_NUM_RANKS}", script, *options]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=directory, timeout=seconds
        )
        assert not done.returncode, done.stderr
        paths = [Path(directory, f"rank-{rank}.json") for rank in range(_NUM_RANKS)]
        return [json.loads(path.read_text()) for path in paths], done.stdout + done.stderr


def train(way: str, device: str) -> None:
    """Train a ResNet on this rank, and write what became of it."""
    import torch
    from step_loops import Place, loss_of
    from step_models import LOADS, SMALL_LOADS

    from paceline import pytorch

    load = LOADS["resnet 25M"] if device == "cuda" else SMALL_LOADS["resnet, small"]
    num_steps, place = _NUM_STEPS[device], Place(device=device)
    times: list[float] = []

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            assert load.make_body is not None
            self.model = context.wrap_model(load.make_body())
            sgd = torch.optim.SGD(self.model.parameters(), lr=1e-3)
            self.optimizer = context.wrap_optimizer(sgd)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = loss_of(self.model, batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            place.synchronize()
            times.append(time.perf_counter())
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": loss_of(self.model, batch)}

        def build_training_data_loader(self) -> Any:
            return load.loader(num_steps * _NUM_RANKS)

        def build_validation_data_loader(self) -> Any:
            return load.loader(_NUM_RANKS)

    torch.manual_seed(0)
    # The order of the sums is to be the only difference.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    size = load.batch_size * _NUM_RANKS
    with pytorch.init(
        hparams={"global_batch_size": size}, seed=1, name="bench", data_parallel=way, device=device
    ) as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(num_steps))
        rank = context.distributed.rank
    told = {
        "weights": [p.double().norm().item() for p in trial.model.parameters()],
        "step_ms": (times[-1] - times[_NUM_WARM]) / (len(times) - 1 - _NUM_WARM) * 1000,
        "backend": torch.distributed.get_backend(),
    }
    Path(f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
