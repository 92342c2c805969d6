"""Which ranks divide a model by a user's plan, and what is refused; with one rank."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel

from paceline._training.engine import tensor_copies_and_digests as _tensor_copies
from paceline._training.engine.checkpoints.sharded_tensor_pieces import (
    HostCopies,
    parts_with_shard,
    take_sharded_tensor_pieces,
)
from paceline._training.engine.checkpoints.state_format import StateInPieces
from paceline._training.engine.fsdp_and_tensor_parallel import (
    RankGrid,
    check_tensor_options,
    check_tensor_size,
    check_whole,
    clip_grad_norm_,
)
from paceline._training.engine.gradient_reduction import (
    DataParallel,
    FlatReduction,
    default_data_parallel,
)
from paceline._training.engine.metric_reducers import Reducer
from paceline._training.engine.model_preparation import ModelOptions
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.precision import Precision
from paceline.core import DistributedContext, NotOfferedError
from paceline.pytorch._trial_training import MetricSums

CPU = torch.device("cpu")


def stepper(**options: Any) -> Stepper:
    return Stepper(DistributedContext.single(), CPU, **options)


@pytest.fixture(scope="module", autouse=True)
def alone_in_group() -> Iterator[None]:
    """Have a process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def divided(*shape: int) -> nn.Parameter:
    """Return a parameter that is divided among one rank."""
    value = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    parameter = nn.Parameter(distribute_tensor(value, DeviceMesh("cpu", [0]), [Shard(0)]))
    parameter.grad = parameter.detach() * 2
    return parameter


@pytest.mark.parametrize(
    ("size", "num_ranks", "error", "text"),
    [
        (2, 3, ValueError, "must divide the number of ranks, but got 2 for 3. Hint: use 2 ranks"),
        (4, 2, ValueError, "must divide the number of ranks, but got 4 for 2. Hint: use 4 ranks"),
        (0, 2, ValueError, "must be at least 1, but got 0"),
        (2.0, 2, TypeError, "must be an integer, but got 2.0"),
        (True, 2, TypeError, "must be an integer, but got True"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(
    size: Any, num_ranks: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"`tensor_parallel_size` {text}"):
        check_tensor_size(size, num_ranks)


@pytest.mark.parametrize("data_parallel", [DataParallel.OVERLAPPED, DataParallel.HOROVOD])
def test_only_some_ways_to_sum_gradients_have_divided_models(data_parallel: DataParallel) -> None:
    check_tensor_options(1, data_parallel)
    with pytest.raises(ValueError, match=f'"flat" or "fsdp".* but got {data_parallel.value!r}'):
        check_tensor_options(2, data_parallel)


@pytest.mark.parametrize(
    ("device_type", "backend", "num_ranks", "tensor_size", "expected"),
    [
        ("cuda", "nccl", 2, 1, DataParallel.OVERLAPPED),
        ("cuda", "nccl", 1, 1, DataParallel.FLAT),
        ("cuda", "nccl", 4, 2, DataParallel.FLAT),
        ("cuda", "gloo", 2, 1, DataParallel.FLAT),
        ("cpu", "gloo", 2, 1, DataParallel.FLAT),
        ("cpu", None, 1, 1, DataParallel.FLAT),
    ],
)
def test_gradients_are_summed_during_the_backward_pass_on_gpus(
    device_type: str,
    backend: str | None,
    num_ranks: int,
    tensor_size: int,
    expected: DataParallel,
) -> None:
    found = default_data_parallel(device_type, backend, num_ranks, tensor_size)
    assert found is expected


def test_one_process_trains_a_whole_model() -> None:
    def divide(model: nn.Module, mesh: Any) -> None:
        raise AssertionError

    alone = stepper(tensor_size=2, precision=Precision.FP16)
    assert alone.grid.tensor_mesh is None
    model = alone.add_model(nn.Linear(2, 2), ModelOptions(tensor_plan=divide))
    assert type(model.weight) is nn.Parameter
    alone.add_optimizer(torch.optim.SGD(model.parameters()))


MODELS = """
import torch
import torch.distributed as dist
from torch import nn
from paceline import pytorch

sent, send = [], dist.broadcast
dist.broadcast = lambda tensor, **options: (sent.append(tensor), send(tensor, **options))


def wrap(change):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    if context.distributed.rank == 1:
        with torch.no_grad():
            change(model)
    sent.clear()
    state = [*context.wrap_model(model).state_dict().values()]
    both = context.distributed.allgather([each.tolist() for each in state])
    assert both[0] == both[1]
    return len(sent)


with pytorch.init() as context:
    wraps = (
        wrap(lambda model: None),
        wrap(lambda model: model[0].weight[1, 2].add_(1e-7)),
        wrap(lambda model: model[1].running_var.add_(1)),
    )
    print("sent", *wraps)
"""


def test_models_that_are_alike_are_not_sent(
    torch_ranks: Any, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODELS)
    result = torch_ranks.run(2, script, directory=tmp_path, environment=clean_environment)
    assert result.returncode == 0, result.stdout
    assert re.findall("sent (.*)", result.stdout) == ["0 7 7", "0 7 7"]


@pytest.mark.parametrize("plan", [{"up": "colwise"}, {1: ColwiseParallel()}, ColwiseParallel, 3])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(TypeError, match="`tensor_plan` must map names of modules"):
        stepper().add_model(nn.Linear(2, 2), ModelOptions(tensor_plan=plan))


def test_who_divides_a_model_without_telling_is_told_what_to_do() -> None:
    model = nn.Linear(2, 2)
    model.weight = divided(2, 2)
    text = r"'weight' is a DTensor over 1 rank\(s\).* Hint: pass `tensor_parallel_size=1`"
    with pytest.raises(ValueError, match=text):
        stepper().add_model(model)
    with pytest.raises(NotOfferedError, match=r"'weight' is a DTensor.*The trial class takes"):
        check_whole(model)


def test_an_optimizer_of_replaced_parameters_is_refused() -> None:
    grid = RankGrid(DistributedContext.single(), CPU)
    model = nn.Linear(2, 2)
    before = list(model.parameters())
    model.weight = nn.Parameter(torch.ones(2, 2))
    grid.note_replaced(before, model)
    grid.check_optimizer(torch.optim.SGD(model.parameters()), [model])
    for parameters in (before, [nn.Parameter(torch.ones(1))]):
        with pytest.raises(ValueError, match="SGD has parameters that are in no model"):
            grid.check_optimizer(torch.optim.SGD(parameters), [model])


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_of_all_kinds_are_clipped_as_whole_ones(norm_type: float) -> None:
    mixed = [divided(3, 2), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1))]
    mixed[1].grad = torch.full((4,), 3.0)
    whole = [nn.Parameter(torch.ones(each.shape)) for each in mixed]
    whole[0].grad, whole[1].grad = mixed[0].grad.full_tensor().clone(), mixed[1].grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(whole, 0.5, norm_type)
    assert float(clip_grad_norm_(mixed, 0.5, norm_type)) == pytest.approx(float(expected))
    torch.testing.assert_close(mixed[0].grad.full_tensor(), whole[0].grad)
    torch.testing.assert_close(mixed[1].grad, whole[1].grad)
    assert float(clip_grad_norm_(nn.Parameter(torch.ones(1)), 1.0)) == 0.0
    mixed[1].grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="must be finite, but is nan"):
        clip_grad_norm_(mixed, 0.5, error_if_nonfinite=True)


def test_pieces_of_divided_gradients_are_summed() -> None:
    parameters = [divided(3, 2), divided(2), nn.Parameter(torch.ones(2))]
    parameters[2].grad = torch.ones(2)
    parameters[1].grad = None

    def all_reduce(flat: torch.Tensor) -> None:
        # Another rank has the same, and of the second parameter ones.
        flat *= 2
        flat[6:8] = 1
        flat[-2] = 1

    reduction = FlatReduction(parameters, CPU, all_reduce)
    assert float(reduction.reduce(1.0)) == 2.0
    assert parameters[0].grad.full_tensor().tolist() == [[4, 8], [12, 16], [20, 24]]
    assert parameters[1].grad.full_tensor().tolist() == [1, 1]
    assert parameters[1].grad.placements == parameters[1].placements
    assert parameters[2].grad.tolist() == [2, 2]


def test_the_ranks_of_a_group_give_one_share_of_metrics() -> None:
    grid = RankGrid(DistributedContext.single(), CPU)
    grid.tensor_size = 2
    # Two groups of two have evaluated 4 and 6.
    ranks: Any = SimpleNamespace(allgather=lambda own: [own, own, ({"n": 6.0}, 1), ({"n": 6.0}, 1)])
    for reducer, expected in ((Reducer.SUM, 10.0), (Reducer.AVG, 5.0), (Reducer.MAX, 6.0)):
        sums = MetricSums(reducer, grid)
        sums.add({"n": 4.0}, 1)
        assert sums.reduce(ranks) == {"n": expected}


def test_another_group_of_ranks_stores_no_copies() -> None:
    for first_rank, names in ((0, {"part.weight", "offsets"}), (1, set())):
        pieces: dict[str, Any] = {}
        state = take_sharded_tensor_pieces({"weight": divided(2, 2)}, "part", pieces, first_rank)
        assert state["weight"].shape == (2, 2)
        assert pieces.keys() == names


@pytest.mark.parametrize("is_crowded", [False, True])
def test_ranks_that_share_cores_copy_their_pieces_by_one_thread_each(
    is_crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers: list[Any] = []
    begin = _tensor_copies._thread.start_new_thread
    monkeypatch.setattr(
        _tensor_copies._thread,
        "start_new_thread",
        lambda function, args: helpers.append(begin(function, args)),
    )
    copies, whole = HostCopies(is_crowded=is_crowded), torch.ones(5_000_000)
    copies.copy({"whole": whole, "piece": divided(3, 2).detach()})
    assert len(helpers) == (not is_crowded)
    result = copies.result()
    assert torch.equal(result["whole"], whole)
    assert torch.equal(result["piece"].local, divided(3, 2).to_local())
    # What is whole is copied by one rank, while the others wait.
    copies.copy({"whole": whole})
    assert len(helpers) == 1 + (not is_crowded)


def test_copies_of_pieces_are_right_whatever_changes_in_a_state() -> None:
    copies, weight, other = HostCopies(), divided(3, 2).detach(), divided(4, 2).detach()
    replaced: Any = divided(3, 2).detach()
    states: list[dict[str, Any]] = [
        {"weight": weight, "step": torch.tensor(1.0), "other": other},
        {"weight": weight, "step": torch.tensor(2.0), "other": other},
        # The same numbers, for others: one of another division, and one of the same.
        {"weight": other, "step": torch.tensor(3.0), "other": weight},
        {"weight": replaced, "step": torch.tensor(4.0), "other": weight},
        {"step": torch.tensor(5.0), "weight": weight},
        {
            "state": StateInPieces(
                {"weight": weight, "step": torch.tensor(6.0)}, "part", is_whole=False
            )
        },
        # Another rank stores it.
        {"state": StateInPieces({"weight": weight}, "part", first_rank=1)},
        {"state": StateInPieces({"weight": weight}, "part")},
    ]
    for state in states:
        copies.copy(state)
        expected = copy.deepcopy(parts_with_shard(state, 0).get("shard_0"))
        weight.mul_(2)
        found = parts_with_shard(copies.result(), 0).get("shard_0")
        assert (found is None) == (expected is None)
        for name, value in (expected or {}).items():
            is_same = value == found[name]
            assert is_same if name == "offsets" else is_same.all()
