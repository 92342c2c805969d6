"""Three processes train as one: flat and overlapped reduction, uneven data, stops, hooks."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from torch import nn
from paceline import core, pytorch
from paceline.journal import RunDirectory

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Linear(2, 2)
    def forward(self, x):
        return self.body(x)

class SlowData(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context, **changes):
        self.context, self.changes, self.stored, self.told_at = context, changes, [], []
        torch.manual_seed(3)
        self.model = context.wrap_model(Net().double())
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        # Without it, no gradients are left to sum after an overlapped or sharded backward pass.
        outside = [] if changes.get("is_all_inside") else [self.scale]
        parameters = [*self.model.parameters(), *outside]
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        )
        weighted = lambda values: sum(index * value for index, value in enumerate(values))
        self.order = context.wrap_reducer(weighted, name="order")
        if changes.get("is_traced"):
            context.set_profiler(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1),
            )
    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        stop_rank = self.changes.get("stop_rank", 1)
        if batch_idx == self.changes.get("stop_at") and self.context.distributed.rank == stop_rank:
            self.context.set_stop_requested(True)
        if (batch_idx, self.context.distributed.rank) == self.changes.get("nan_at"):
            x = x * float("nan")
        if self.changes.get("slow_forward") == self.context.distributed.rank:
            time.sleep(0.2)
        if self.changes.get("has_two_passes"):
            self.context.backward(self.model(x).pow(2).mean() / 9)
        loss = nn.functional.mse_loss(self.model(x) * self.scale, y)
        if self.changes.get("is_plain"):
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.context.backward(loss)
            is_kept = bool(self.changes.get("is_kept")) and batch_idx % 3 != 2
            self.context.step_optimizer(self.optimizer, auto_zero_grads=not is_kept)
        for value in x[:, 0].tolist():
            self.order.update(value)
        extra = {"extra": 1.0} if self.changes.get("keys") == self.context.distributed.rank else {}
        return {"loss": loss, **extra}
    def evaluate_batch(self, batch):
        for value in batch[0][:, 0].tolist():
            self.order.update(value)
        return {"error": nn.functional.mse_loss(self.model(batch[0]) * self.scale, batch[1])}
    def data(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.changes.get("size", 41), 4, generator=generator).double()
        is_slow = self.changes.get("slow_data") == self.context.distributed.rank
        kind = SlowData if is_slow else torch.utils.data.TensorDataset
        return kind(x, x.sum(1, keepdim=True))
    def build_training_data_loader(self):
        batch_size = self.changes.get("batch_size", 4)
        return pytorch.DataLoader(self.data(), batch_size=batch_size, shuffle=True)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=4)
    def build_callbacks(self):
        trial = self
        class Note(pytorch.PyTorchCallback):
            def on_checkpoint_upload_end(self, uuid):
                trial.stored.append(uuid)
                trial.told_at.append(trial.context.current_train_batch())
        return {"note": Note()}

class Gan(Trial):
    # The second optimizer steps every other batch; losses may be scaled by hand.
    def __init__(self, context, **changes):
        super().__init__(context, **changes)
        self.generator = context.wrap_model(nn.Linear(4, 4).double())
        adam = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        self.second = context.wrap_optimizer(adam)
        self.scaler = None
        if changes.get("is_scaled"):
            self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0))
    def step(self, optimizer, loss, clip_grads=None):
        self.context.backward(loss if self.scaler is None else self.scaler.scale(loss))
        self.context.step_optimizer(optimizer, clip_grads, scaler=self.scaler)
    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        made = self.generator(x)
        loss = nn.functional.mse_loss(self.model(made.detach()) * self.scale, y)
        clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)
        self.step(self.optimizer, loss, clip if self.changes.get("is_clipped") else None)
        if batch_idx % 2:
            self.step(self.second, (self.model(made) - 1).pow(2).mean())
            self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.update()
        return {"loss": loss}

def timed(run_dir, rank):
    # Rows of one step add to each other.
    rows = {}
    group = "profiling" if rank == 0 else f"profiling_rank_{rank}"
    for row in core.read_metrics(RunDirectory(run_dir), group, rank=rank):
        rows.setdefault(row.steps_completed, {}).update(row.metrics)
    return list(rows.values())

def train(name, changes, fit, **options):
    said = {}
    options = {"hparams": {"global_batch_size": 12}, "seed": 7, "num_shards": 3, **options}
    with pytorch.init(**options) as context:
        trial = (Gan if changes.get("is_gan") else Trial)(context, **changes)
        fit = {"max_length": pytorch.Batch(17), "reporting_period": pytorch.Batch(5), **fit}
        try:
            trainer = pytorch.Trainer(trial, context)
            result = trainer.fit(**fit)
            if changes.get("is_continued"):
                result = trainer.fit(**{**fit, "max_length": pytorch.Batch(20)})
                said["checkpoints"] = result.checkpoints
            said["stop"], said["steps"] = result.stop_reason, result.steps_completed
            said["rows"] = [row.metrics["loss"] for row in result.history("training")]
            said["orders"] = [row.metrics["order"] for row in result.history("training")]
            said["orders"] += [row.metrics["order"] for row in result.history("validation")]
            said["error"] = result.metrics["error"] if "error" in result.metrics else None
            said["timed"] = timed(result.run_dir, context.distributed.rank)
            traces = Path(result.run_dir).glob("tensorboard/**/*.json")
            said["traces"] = sorted(str(path.relative_to(result.run_dir)) for path in traces)
            said["stored"] = trial.stored == result.checkpoints and len(trial.stored)
            said["told_at"] = trial.told_at
        except (ArithmeticError, pytorch.KeySetError) as error:
            said["raised"] = str(error)
        models = context.models
        parameters = [p for model in models for p in model.parameters()]
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
        said["weights"] = [p.tolist() for p in (*whole, trial.scale)]
        by_rank = context.distributed.allgather(said)
        if context.distributed.rank == 0:
            with open(f"{name}.said.json", "w") as file:
                json.dump(by_rank, file)

CASES = {
    "flat": ({}, {}, {}),
    "overlapped": ({}, {}, {"data_parallel": "overlapped"}),
    "windows": ({}, {"aggregation_frequency": 3}, {}),
    "overlapped windows": ({}, {"aggregation_frequency": 3}, {"data_parallel": "overlapped"}),
    "shorter than the world": ({"size": 5}, {}, {}),
    "two passes": ({"has_two_passes": True}, {}, {}),
    "overlapped two passes": ({"has_two_passes": True}, {}, {"data_parallel": "overlapped"}),
    "kept": ({"is_kept": True}, {}, {}),
    "overlapped kept": ({"is_kept": True}, {}, {"data_parallel": "overlapped"}),
    "stop": ({"stop_at": 6}, {}, {}),
    "told": ({}, {"checkpoint_period": pytorch.Batch(4)}, {}),
    "nan on 0": ({"nan_at": (6, 0)}, {"stop_on_nan": True}, {}),
    "nan on 2": ({"nan_at": (6, 2)}, {"stop_on_nan": True}, {}),
    "keys": ({"keys": 1}, {}, {}),
    "fp16": ({}, {}, {"precision": "fp16"}),
    "continued": ({"is_continued": True, "is_traced": True}, {}, {}),
}
profiled = {"max_length": pytorch.Batch(4), "reporting_period": pytorch.Batch(2)}
profiled |= {"profiling_enabled": True, "checkpoint_period": pytorch.Batch(1)}
CASES |= {
    "slow forward": ({"slow_forward": 2}, profiled, {}),
    "slow plain": ({"slow_forward": 0, "is_plain": True}, profiled, {}),
    "slow data": ({"slow_data": 0}, profiled, {}),
    "slow overlapped": ({"slow_data": 2}, profiled, {"data_parallel": "overlapped"}),
}
for kind in ("overlapped", "fsdp"):
    for rank in (0, 2):
        changes = {"stop_at": 6, "stop_rank": rank, "is_all_inside": True, "size": 48}
        CASES[f"stop {kind} {rank}"] = changes, {}, {"data_parallel": kind}
        fit = {"max_length": pytorch.Batch(200), "reporting_period": pytorch.Batch(50)}
        changes = {**changes, "stop_at": 150}
        CASES[f"late stop {kind} {rank}"] = changes, fit, {"data_parallel": kind}
KINDS = {"": {}, " clipped": {"is_clipped": True}, " scaled": {"is_scaled": True}}
for name, extra in KINDS.items():
    changes = {"is_gan": True, **extra}
    CASES["gan" + name] = changes, {}, {}
    CASES["whole gan" + name] = {**changes, "batch_size": 12}, {}, {"num_shards": 1}
CASES["overlapped gan"] = {"is_gan": True}, {}, {"data_parallel": "overlapped"}
for name in sys.argv[1:]:
    train(name, *CASES[name][:2], **CASES[name][2])
"""

# A backward pass adds to gradients that are sums over the ranks already; or it comes in a batch
# that leaves out ranks, after one in which the generator was called alone.
LEFT = "overlapped two passes", "overlapped kept", "overlapped gan"
GANS = "gan", "gan clipped", "gan scaled"
ALONE = "stop overlapped 0", "stop overlapped 2", "stop fsdp 0", "stop fsdp 2"
LATE = "late stop overlapped 0", "late stop fsdp 2"
# The slow rank, and the part of a step in which it is slow.
SLOW = {
    "slow forward": (2, "forward_s"),
    "slow plain": (0, "forward_s"),
    "slow data": (0, "data_wait_s"),
    "slow overlapped": (2, "data_wait_s"),
}

Said = Mapping[str, list[dict[str, Any]]]


def run(ranks: Any, directory: Path, num_workers: int, *cases: str) -> Said:
    (directory / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    script = directory / "train.py"
    done = ranks.run(num_workers, script, *cases, directory=directory, environment=environment)
    assert done.returncode == 0, done.stdout
    said = directory.glob("*.said.json")
    return {path.name.removesuffix(".said.json"): json.loads(path.read_text()) for path in said}


def flat_weights(said: dict[str, Any]) -> list[float]:
    flat: list[float] = []

    def walk(value: Any) -> None:
        for item in value if isinstance(value, list) else ():
            walk(item)
        if not isinstance(value, list):
            flat.append(value)

    walk(said["weights"])
    return flat


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any) -> Said:
    return run(
        torch_ranks, tmp_path_factory.mktemp("alone"), 1, "flat", "windows", "two passes", "kept",
        "shorter than the world", "gan scaled", *[f"whole {gan}" for gan in GANS],
    )  # fmt: skip


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any) -> Said:
    return run(
        torch_ranks, tmp_path_factory.mktemp("three"), 3, "flat", "overlapped", "windows",
        "overlapped windows", "shorter than the world", "stop", "nan on 0", "nan on 2", "keys",
        "fp16", "continued", "told", "two passes", "kept", *LEFT, *GANS, *SLOW, *ALONE, *LATE,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "case", ["flat", "windows", "shorter than the world", "two passes", "kept"]
)
def test_three_ranks_train_as_one(alone: Said, three: Said, case: str) -> None:
    """The last batch of an epoch has 5 samples: shards of 4, 1 and 0."""
    expected = flat_weights(alone[case][0])
    for said in three[case]:
        assert flat_weights(said) == pytest.approx(expected, rel=1e-9)
        assert said["error"] == pytest.approx(alone[case][0]["error"], rel=1e-9)
        assert said["rows"] == pytest.approx(alone[case][0]["rows"], rel=1e-9)
        assert said["orders"] == alone[case][0]["orders"]


@pytest.mark.parametrize("case", GANS)
def test_optimizers_of_one_batch_see_each_others_steps(alone: Said, three: Said, case: str) -> None:
    """Also on a rank without samples, and where the second one steps every other batch."""
    for said in three[case]:
        assert flat_weights(said) == pytest.approx(
            flat_weights(alone[f"whole {case}"][0]), rel=1e-9
        )


@pytest.mark.parametrize(
    ("case", "flat"),
    [
        ("overlapped", "flat"),
        ("overlapped windows", "windows"),
        ("overlapped two passes", "two passes"),
        ("overlapped kept", "kept"),
        ("overlapped gan", "gan"),
    ],
)
def test_overlapped_reduction_gives_what_flat_reduction_gives(
    three: Said, case: str, flat: str
) -> None:
    for said in three[case]:
        assert flat_weights(said) == pytest.approx(flat_weights(three[flat][0]), rel=1e-9)


@pytest.mark.parametrize("case", ["flat", "overlapped", "fp16", *GANS, *LEFT])
def test_ranks_hold_the_same_weights_to_the_last_bit(three: Said, case: str) -> None:
    assert all(said["weights"] == three[case][0]["weights"] for said in three[case])


def test_stop_asked_for_by_one_rank_ends_all_at_the_same_step(three: Said) -> None:
    assert {(said["stop"], said["steps"]) for said in three["stop"]} == {("stop requested", 8)}


@pytest.mark.parametrize("case", ALONE)
def test_stop_is_heard_a_step_later_where_no_gradients_take_it_along(
    three: Said, case: str
) -> None:
    assert {(said["stop"], said["steps"]) for said in three[case]} == {("stop requested", 9)}


@pytest.mark.parametrize("case", LATE)
def test_late_stop_is_heard_by_all_ranks_within_an_eighth_of_the_steps(
    three: Said, case: str
) -> None:
    reason, num_steps = three[case][0]["stop"], three[case][0]["steps"]
    assert {(said["stop"], said["steps"]) for said in three[case]} == {(reason, num_steps)}
    assert reason == "stop requested"
    assert 152 <= num_steps <= 151 + 150 // 8 + 2


def test_ranks_are_told_of_checkpoints_in_the_batch_after_the_next_one(three: Said) -> None:
    """A save does not wait for the other ranks. The checkpoints come after 4, 8, 12, 16 and 17."""
    told_at = three["told"][0]["told_at"]
    assert all(said["told_at"] == told_at for said in three["told"])
    assert all(said["stored"] == 5 for said in three["told"])
    assert set(told_at) <= {4, 8, 12, 16}


@pytest.mark.parametrize("rank", [0, 2])
def test_nan_on_one_rank_is_raised_on_all_with_its_rank_and_batch(three: Said, rank: int) -> None:
    for said in three[f"nan on {rank}"]:
        assert f"rank {rank} at batch 6" in said["raised"]


def test_names_that_differ_between_ranks_are_an_error_on_all(three: Said) -> None:
    for said in three["keys"]:
        assert "rank 0 returned ['loss'] and rank 1 ['extra', 'loss']" in said["raised"]


def test_every_rank_is_told_of_the_same_checkpoints(three: Said) -> None:
    assert [said["stored"] for said in three["flat"]] == [1, 1, 1]


def test_every_rank_returns_the_checkpoints_of_a_second_fit(three: Said) -> None:
    first, *others = (said["checkpoints"] for said in three["continued"])
    assert len(first) == 1
    assert others == [first, first]


# ---- where the time goes ---------------------------------------------------------------------


@pytest.mark.parametrize("case", SLOW)
def test_a_straggler_is_named_with_the_part_that_is_slow(three: Said, case: str) -> None:
    """The slow rank sleeps 0.2 s in three of four batches, the last has nothing for rank 2."""
    slowest, part = SLOW[case]
    reports = [row for row in three[case][0]["timed"] if "slowest_rank" in row]
    assert [row["slowest_rank"] for row in reports] == [slowest, slowest]
    assert all(row["slowest_rank_lag_s"] > 0 for row in reports)
    assert all(row[f"max_{part}"] > row[f"mean_{part}"] for row in reports)
    total = [sum(row[part] for row in said["timed"]) for said in three[case]]
    assert total.index(max(total)) == slowest
    # The others wait for it where gradients are summed.
    wait = "backward_s" if "overlapped" in case else "reduce_s"
    waited = [sum(row[wait] for row in said["timed"]) for said in three[case]]
    assert waited.index(min(waited)) == slowest


@pytest.mark.parametrize("case", SLOW)
def test_the_parts_of_each_batch_add_up_on_each_rank(three: Said, case: str) -> None:
    parts = "forward_s", "backward_s", "reduce_s", "optimizer_step_s"
    for rank, said in enumerate(three[case]):
        assert len(said["timed"]) == 4
        assert all(row["checkpoint_stall_s"] > 0 for row in said["timed"])
        # In the last batch the sum over the ranks is outside of `train_batch`.
        for row in said["timed"][:3]:
            assert sum(row[name] for name in parts) == pytest.approx(row["train_batch_s"])
            assert min(row[name] for name in parts) >= 0
        assert ("slowest_rank" in said["timed"][1]) == (rank == 0)


def test_times_are_recorded_only_where_they_are_asked_for(three: Said) -> None:
    chief, *others = (said["timed"] for said in three["flat"])
    assert all("samples_per_second" in row and len(row) == 3 for row in chief)
    assert others == [[], []]


def test_each_rank_writes_traces_of_its_own(three: Said) -> None:
    """All ranks have written theirs when the chief's `fit` has returned."""
    names = [
        "batch_3.pt.trace.json",
        "rank_1/batch_3.pt.trace.json",
        "rank_2/batch_3.pt.trace.json",
    ]
    assert three["continued"][0]["traces"] == [f"tensorboard/{name}" for name in names]
    assert three["flat"][0]["traces"] == []
