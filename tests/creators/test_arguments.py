"""What a trainer refuses, before any worker is started."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from paceline.creators import BATCH_SIZE, PyTorchTrainer, ResourcesError
from paceline.creators._creator_arguments import (
    GivenParameters,
    HookWorker,
    call_hook,
    call_with,
    creator_precision,
    make_replica_spec,
)


def create(*_: Any) -> None: ...


def make(**given: Any) -> PyTorchTrainer:
    creators = dict.fromkeys(("model_creator", "data_creator", "optimizer_creator"), create)
    return PyTorchTrainer(**{**creators, "loss_creator": nn.MSELoss, **given})


def unknown_name(config: Any, net: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"model_creator": None}, ValueError, "`model_creator` must be a function .* but got None"),
        ({"data_creator": [1]}, ValueError, r"`data_creator` must be a function .* got \[1\]"),
        ({"optimizer_creator": 3}, ValueError, "`optimizer_creator` must be a function .* got 3"),
        ({"scheduler_creator": 3}, ValueError, "`scheduler_creator` must be a function"),
        ({"loss_creator": None}, ValueError, "`loss_creator` must be given, but is None"),
        ({"train_function": 3}, ValueError, "`train_function` must be a function, but got 3"),
        ({"train_function": unknown_name}, ValueError, "'net' is none of config, model, models"),
        ({"validation_function": True}, ValueError, "`validation_function` must be a function"),
        ({"initialization_hook": 3}, ValueError, "`initialization_hook` must be a function"),
        ({"config": []}, TypeError, "`config` must be a dictionary, but got list"),
        ({"dataloader_config": 3}, TypeError, "`dataloader_config` must be a dictionary"),
        ({"dataloader_config": {"batch_size": 3}}, ValueError, "must not name a batch size"),
        ({"num_replicas": 0}, ValueError, "`num_replicas` must be greater than 0, but got 0"),
        ({"num_workers": -1}, ValueError, "`num_workers` must be greater than 0, but got -1"),
        ({"num_workers": 2.0}, TypeError, "`num_workers` must be an integer, but got 2.0"),
        ({"num_workers": 2, "num_replicas": 2}, TypeError, "are the same: give one of them"),
        ({"batch_size": 1, "num_replicas": 2}, ValueError, r"the number of workers \(2\).* got 1"),
        ({"batch_size": "16"}, TypeError, "`batch_size` must be an integer, but got '16'"),
        ({"config": {BATCH_SIZE: 1}, "num_workers": 2}, ValueError, r"`config\['\*batch_size'\]`"),
        ({"scheduler_step_freq": "step"}, ValueError, "one of 'batch', 'epoch', 'manual', but"),
        ({"scheduler_creator": create, "scheduler_step_freq": None}, ValueError, "but is None"),
        ({"backend": "mpi"}, ValueError, "`backend` must be one of 'auto', 'gloo', 'nccl'"),
        ({"use_gpu": "yes"}, ValueError, "`use_gpu` must be True, False or 'auto'"),
        ({"timeout_s": 0}, ValueError, "`timeout_s` must be above 0, but got 0"),
        ({"cluster": "slurm"}, ValueError, "`cluster` must be one of 'auto', 'local', 'ray'"),
        ({"use_fp16": "fp8"}, ValueError, "`use_fp16` must be True, False or 'bf16'"),
        ({"apex_args": "O1"}, ValueError, "`apex_args` must be a dictionary, but got str"),
        ({"num_cpus_per_worker": 9999}, ResourcesError, "need 9999 CPU core"),
        ({"num_replicas": 9999, "batch_size": 9999}, ResourcesError, "but 9999 are asked for"),
        ({"run_dir": "s3://bucket/x"}, ValueError, "`run_dir` must be a directory of this machine"),
        ({"checkpoint_storage": "s3://"}, ValueError, "must be like s3://bucket/prefix"),
        ({"data_loader_args": {}}, DeprecationWarning, "Hint: give `dataloader_config`"),
        ({"training_operator_cls": create}, DeprecationWarning, "Hint: give `train_function`"),
        ({"wrap_ddp": False}, DeprecationWarning, "gradients are summed over all workers"),
        ({"use_local": True}, DeprecationWarning, "leave it out"),
        ({"learning_rate": 1}, TypeError, "no argument 'learning_rate'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    given: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make(**given)


def test_a_gpu_that_this_machine_lacks_is_refused_before_workers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # The initialization hook would be the first that workers do.
    with pytest.raises(ResourcesError, match="With `use_gpu=True` each worker needs a GPU") as info:
        make(use_gpu=True, initialization_hook=lambda: 1 / 0)
    assert info.value.__cause__ is None


def test_a_worker_must_not_start_workers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(RuntimeError, match="in a process that works alone"):
        make()


@pytest.mark.parametrize(
    ("use_fp16", "args", "precision", "warned"),
    [
        (False, None, "fp32", []),
        (False, {"opt_level": "O1"}, "fp32", ["has no effect without `use_fp16=True`"]),
        (True, None, "fp16", []),
        ("apex", {}, "fp16", []),
        ("bf16", None, "bf16", []),
        (True, {"opt_level": "O0"}, "fp32", []),
        (True, {"opt_level": "O1", "num_losses": 1, "verbosity": 0}, "fp16", []),
        (True, {"opt_level": "O3", "num_losses": 2}, "fp16", ["'O3' of", "one scale serves 2"]),
        (True, {"keep_batchnorm_fp32": True}, "fp16", ["counterpart: keep_batchnorm_fp32"]),
    ],
)
def test_apex_is_mapped_and_what_has_no_counterpart_is_told(
    use_fp16: Any,
    args: dict[str, Any] | None,
    precision: str,
    warned: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert creator_precision(use_fp16, args) == precision
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(warned)
    assert all(part in text for part, text in zip(warned, texts, strict=True))


def test_an_unknown_level_of_apex_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`apex_args\['opt_level'\]` must be one of 'O0'"):
        creator_precision(True, {"opt_level": "O4"})


# ---- binding by name -----------------------------------------------------------------------------

GIVEN = GivenParameters("config", "m", "data", "loss", "opt", "sched", {"a": 1}, "scaler", "cpu")


def first(models: Any, dataloader: Any, criterion: Any, optimizers: Any, config: Any) -> Any:
    return models, dataloader, criterion, optimizers, config


def second(
    config: Any,
    model: Any,
    train_iterator: Any,
    criterion: Any,
    optimizer: Any,
    scheduler: Any = None,
) -> Any:
    return config, model, train_iterator, criterion, optimizer, scheduler


def by_position(model: Any, /, *args: Any, info: Any, unknown: int = 7, **kwargs: Any) -> Any:
    return model, args, info, unknown, kwargs


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (first, ("m", "data", "loss", "opt", "config")),
        (second, ("config", "m", "data", "loss", "opt", "sched")),
        (by_position, ("m", (), {"a": 1}, 7, {})),
        (lambda device, scaler: (device, scaler), ("cpu", "scaler")),
    ],
)
def test_functions_get_what_their_parameters_are_named_after(
    function: Callable[..., Any], expected: Any
) -> None:
    assert call_with(function, GIVEN) == expected


def test_hooks_are_called_by_arity() -> None:
    worker = HookWorker(rank=1, world_size=2, local_rank=1, node_rank=0, config={"a": 1})
    called: list[Any] = []
    call_hook(lambda: called.append("nothing"), worker)
    call_hook(lambda runner: called.append(runner.rank), worker)
    call_hook(lambda runner=None: called.append(runner), worker)
    assert called == ["nothing", 1, None]


@pytest.mark.parametrize(
    ("num_workers", "shard_size"), [(1, 16), (3, 5), (16, 1), (17, 1), (1000, 1)]
)
def test_any_number_of_workers_has_a_batch_size_that_nobody_has_set(
    num_workers: int, shard_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    default = inspect.signature(PyTorchTrainer).parameters["batch_size"].default
    names = ("model_creator", "data_creator", "optimizer_creator", "loss_creator")
    spec = make_replica_spec(
        creators={**dict.fromkeys(names, create), "scheduler_creator": None},
        functions=dict.fromkeys(("train_function", "validation_function", "initialization_hook")),
        config=None,
        loader_config=None,
        num_workers=num_workers,
        batch_size=default,
        precision="fp32",
        settings={
            "scheduler_step_freq": "batch",
            "use_gpu": False,
            "backend": "auto",
            "timeout_s": 1.0,
            "deals_out": True,
            "is_serial": True,
            "seed": 0,
            "verify_steps": None,
            "on_mismatch": "stop",
        },
    )
    assert spec.shard_size == shard_size
    assert not caplog.records
