"""Part of `gpu.py`: a model that FSDP2 divides between two ranks on one GPU.

Both ranks share one GPU, which NCCL refuses, so they meet over gloo: what this shows is that the
same weights come out whatever interrupts a training, and what Paceline adds to a step.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

_KINDS = ("fp32", "bf16", "bf16, compiled")
_NUM_BATCHES, _BATCH, _WIDTH = 24, 32, 256
# Losses of sums in another order, and of what bf16 rounds.
_MOST_APART = {"fp32": 1e-4, "bf16": 2e-2, "bf16, compiled": 2e-2}
_NUM_BLOCKS = {"cuda": 12, "cpu": 4}


def main() -> None:
    """Train whole and interrupted, and measure a step."""
    from fsdp_steps import measure_fsdp_steps
    from gpu_machine import part_arguments
    from gpu_record import check, emit_figure
    from gpu_reduction import launch

    parser = part_arguments(__doc__)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        train_all(given.device)
        return
    ranks, _ = launch(__file__, ["--child", "--device", given.device], given.seconds)
    for kind in _KINDS:
        told = [rank[kind] for rank in ranks]
        check(
            f"FSDP2, {kind}: a resumed training ends in the same bits",
            all(rank["whole"] == rank["resumed"] for rank in told),
            result=f"{told[0]['bytes']:,} bytes of each rank",
            why=f"backend: {ranks[0]['backend']}; each rank holds {told[0]['share']:.2f} of it",
        )
        check(
            f"FSDP2, {kind}: a second training ends in the same bits",
            all(rank["whole"] == rank["again"] for rank in told),
            result="without an interruption",
        )
        loss, flat = told[0]["loss"], told[0]["flat_loss"]
        check(
            f"FSDP2, {kind}: the loss of a model that is not divided",
            abs(loss - flat) <= _MOST_APART[kind] * flat,
            result=f"{loss:.6f}, not divided {flat:.6f}",
            bar=f"{_MOST_APART[kind]:.0e} apart",
        )
    for figure in measure_fsdp_steps(_NUM_BLOCKS[given.device], 1, given.device):
        # A rehearsal of few blocks says nothing of what a step costs.
        emit_figure(figure if given.device == "cuda" else replace(figure, bar=None))


def train_all(device: str) -> None:
    """Train on this rank in each precision, and write what became of it."""
    import torch

    told: dict[str, Any] = {}
    for kind in _KINDS:
        precision, _, compiled = kind.partition(", ")

        def fit(length: int, way: str = "fsdp", run: Any = None) -> tuple[Any, Any, int]:
            return _fit(length, device, precision, bool(compiled), way, run)  # noqa: B023

        whole, result, rank = fit(_NUM_BATCHES)
        _, half, _ = fit(_NUM_BATCHES // 2)
        resumed, _, _ = fit(_NUM_BATCHES, run=half.run_dir)
        again, _, _ = fit(_NUM_BATCHES)
        flat, flat_result, _ = fit(_NUM_BATCHES, "flat")
        num_bytes = sum(value.nbytes for value in whole)
        told[kind] = {
            "whole": _digest(whole),
            "resumed": _digest(resumed),
            "again": _digest(again),
            "bytes": num_bytes,
            "share": num_bytes / sum(value.nbytes for value in flat),
            "loss": result.metrics["loss"],
            "flat_loss": flat_result.metrics["loss"],
        }
    told["backend"] = torch.distributed.get_backend()
    Path(f"rank-{rank}.json").write_text(json.dumps(told))


def _digest(values: list[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def _fit(
    length: int, device: str, precision: str, compiled: bool, way: str, run: Any
) -> tuple[Any, Any, int]:
    import torch

    from paceline import pytorch

    with pytorch.init(
        {"global_batch_size": 2 * _BATCH}, seed=1, precision=precision, data_parallel=way,
        device=device, resume=run, name=f"{precision}-{way}-{length}",
    ) as context:  # fmt: skip
        trial = _trial_class()(context, compiled)
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(length))
        rank = context.distributed.rank
    values = [getattr(value, "to_local", value.clone)() for value in trial.model.parameters()]
    values = [value.detach().cpu() for value in values]
    assert torch.stack([value.double().norm() for value in values]).isfinite().all()
    return values, result, rank


def _trial_class() -> Callable[..., Any]:
    import torch
    from torch import nn

    from paceline import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext, compiled: bool) -> None:
            self.context = context
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(4)]
            model = nn.Sequential(*layers, nn.Linear(_WIDTH, 2))
            # What torch compiles then does not depend on what it compiled before.
            self.model = context.wrap_model(model, compile=compiled and {"dynamic": False})
            adam = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.optimizer = context.wrap_optimizer(adam)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any, batch_idx: int = 0) -> Any:
            return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

        def build_training_data_loader(self) -> Any:
            x = torch.randn(2048, _WIDTH, generator=torch.Generator().manual_seed(1))
            data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
            return pytorch.DataLoader(data, batch_size=_BATCH)

        build_validation_data_loader = build_training_data_loader

    return Trial


if __name__ == "__main__":
    main()
