"""Directories of torch.distributed.checkpoint, written and read; weights to begin with."""

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from paceline._training.engine.checkpoints.capture_and_restore import ModelsAndOptimizers
from paceline._training.engine.checkpoints.state_format import save_state
from paceline._training.engine.checkpoints.weight_exports import export_dcp, export_weights
from paceline._training.engine.checkpoints.weights_from_checkpoints import (
    load_optimizer_state,
    load_weights,
)
from paceline.storage import CheckpointCorruptError
from paceline.storage._checkpoint_errors import STATE_VERSION, CheckpointMismatchError


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3).bfloat16()
    )
    tied = torch.nn.Linear(3, 3, bias=False)
    tied.weight = model[0].weight
    return model.append(tied)


def assert_alike(one: torch.nn.Module, other: torch.nn.Module) -> None:
    expected = other.state_dict()
    assert one.state_dict().keys() == expected.keys()
    for name, value in one.state_dict().items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def alone(function: Callable[..., Any], state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        function(state, checkpoint_id=path, no_dist=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a trainer's checkpoint of the model with the seed 0."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_state({**make_model().state_dict(), "_extra_state": "text"}, directory, "model_0")
    save_state({"version": STATE_VERSION, "num_models": 1}, directory, "training")
    return directory


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Return a directory that DCP has written, with the model and more."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    alone(dcp.save, state, tmp_path / "theirs")
    return tmp_path / "theirs"


def test_the_library_loads_what_is_exported(checkpoint: Path, tmp_path: Path) -> None:
    exported = export_dcp(checkpoint, tmp_path / "dcp")
    assert exported.left_out == ("_extra_state",)
    assert not exported.tied
    model = make_model(1)
    alone(dcp.load, {"model": model.state_dict()}, tmp_path / "dcp")
    assert_alike(model, make_model())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "dcp"]
    with pytest.raises(FileExistsError, match="'.*dcp' is there already"):
        export_dcp(checkpoint, tmp_path / "dcp")
    (checkpoint / "model_0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointCorruptError, match=r"model_0\.safetensors"):
        export_dcp(checkpoint, tmp_path / "other")


def test_weights_of_every_kind_are_begun_with(
    checkpoint: Path, theirs: Path, tmp_path: Path
) -> None:
    export_weights(theirs, tmp_path / "file")
    assert "0.weight" in load_file(tmp_path / "file")
    export_weights(tmp_path / "file", tmp_path / "one", max_shard_size="1MB")
    export_weights(tmp_path / "one", tmp_path / "several", max_shard_size=1)
    assert len(list((tmp_path / "several").iterdir())) > 2
    # Where tied weights are stored once, all their names get them.
    export_weights(checkpoint, tmp_path / "tied")
    assert "3.weight" not in load_file(tmp_path / "tied")
    (checkpoint / "model_0.json").write_text(
        (checkpoint / "model_0.json").read_text().replace(', "_extra_state": "text"', "")
    )
    # What a train function has saved.
    (tmp_path / "function").mkdir()
    save_state(
        {"model": dict(make_model().state_dict()), "epoch": 3}, tmp_path / "function", "state"
    )
    with pytest.raises(
        CheckpointMismatchError, match="'epoch'. Hint: the checkpoint holds model, e"
    ):
        load_weights(make_model(), tmp_path / "function", key="epoch")
    files = [tmp_path / name for name in ("file", "one", "several", "tied", "function")]
    for place in (theirs, *files, checkpoint):
        model = make_model(1)
        load_weights(model, place)
        assert_alike(model, make_model())


def test_what_does_not_fit_is_named(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"begin with model, optimizer, step"):
        load_weights(make_model(), theirs, key="app")
    with pytest.raises(CheckpointMismatchError, match=r"it has \['model\.0\.bias'.*besides"):
        load_weights(make_model(), theirs, key="")
    with pytest.raises(CheckpointMismatchError, match=r"lacks \['4\.bias', '4\.weight'\]"):
        load_weights(make_model().append(torch.nn.Linear(3, 3)), theirs)
    before = make_model(1).append(torch.nn.Identity())
    before[0] = torch.nn.Linear(4, 3)
    with pytest.raises(
        CheckpointMismatchError, match=r"'0\.weight' is \[3, 3\] there and \[3, 4\]"
    ):
        load_weights(before, theirs)
    with pytest.raises(CheckpointMismatchError, match="has no training.json"):
        load_weights(make_model(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a"}}')
    with pytest.raises(CheckpointCorruptError, match="must be beside it"):
        load_weights(make_model(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing"}}')
    with pytest.raises(CheckpointCorruptError, match="missing in"):
        load_weights(make_model(), tmp_path)


def test_a_value_that_is_no_tensor_is_not_unpickled(tmp_path: Path) -> None:
    class WithMore(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return _Evil()

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    state = {"model": WithMore(2, 2).state_dict()}
    alone(dcp.save, state, tmp_path / "dcp")
    with pytest.raises(CheckpointMismatchError, match=r"lacks \['_extra_state'\]"):
        load_weights(WithMore(2, 2), tmp_path / "dcp")
    exported = export_weights(tmp_path / "dcp", tmp_path / "out")
    assert exported.left_out == ("_extra_state",)
    assert load_file(tmp_path / "out").keys() == {"weight", "bias"}


class _Evil:
    def __reduce__(self) -> Any:
        return _run, ()


_RUN: list[str] = []


def _run() -> None:
    _RUN.append("code of a checkpoint was run")


class _Attribute:
    def __reduce__(self) -> Any:
        return getattr, ("text", "upper")


def test_metadata_that_python_3_11_2_has_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(
        encoding, "__reduce_ex__", lambda self, _: (getattr, (self.__class__, self._name_))
    )
    alone(dcp.save, {"model": make_model().state_dict()}, tmp_path / "dcp")
    assert b"getattr" in (tmp_path / "dcp/.metadata").read_bytes()
    model = make_model(1)

    load_weights(model, tmp_path / "dcp")

    assert_alike(model, make_model())


@pytest.mark.parametrize("value", [_Evil(), _Attribute(), eval, torch.load, torch.nn.Linear])
def test_metadata_with_anything_else_is_refused(theirs: Path, value: Any) -> None:
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    metadata.planner_data = value
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorruptError, match="which is not allowed there"):
        load_weights(make_model(), theirs)
    assert not _RUN


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "'__0_0.distcp'.*a piece of 'model"),
        (lambda path: (path / "__0_0.distcp").write_bytes(b"?" * 99), "'__0_0.distcp'"),
        (lambda path: (path / ".metadata").write_bytes(b"?"), r"\.metadata in"),
        (lambda path: _change(path, lambda m: m.storage_data.clear()), "all pieces of 'model"),
        (
            lambda path: _change(
                path, lambda m: [vars(v).update(relative_path="../a") for v in _places(m)]
            ),
            "must be plain",
        ),
        (
            lambda path: _change(
                path,
                lambda m: [vars(v).update(transform_descriptors=["zip"]) for v in _places(m)],
            ),
            "stored by",
        ),
        (lambda path: _swap_with_code(path / "__0_0.distcp"), "'__0_0.distcp'"),
    ],
)
def test_a_damaged_directory_is_refused(
    theirs: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(theirs)
    with pytest.raises(CheckpointCorruptError, match=message):
        load_weights(make_model(), theirs)
    assert not _RUN


def _places(metadata: Any) -> Any:
    return metadata.storage_data.values()


def _change(path: Path, change: Callable[[Any], Any]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _swap_with_code(path: Path) -> None:
    torch.save(_Evil(), path.with_name("evil"))
    data = path.with_name("evil").read_bytes()
    path.write_bytes(data)
    _change(path.parent, lambda m: [vars(v).update(offset=0, length=len(data)) for v in _places(m)])


def test_a_file_of_weights_is_not_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "file")
    shutil.copy(tmp_path / "file", tmp_path / "model.safetensors")
    model = torch.nn.Linear(2, 2, bias=False)
    load_weights(model, tmp_path)
    assert torch.equal(model.weight, torch.ones(2, 2))


# ---- optimizers ------------------------------------------------------------------------------


def make_adam(model: torch.nn.Module, lr: float = 0.5, num_steps: int = 0) -> torch.optim.Optimizer:
    """Return an optimizer whose groups are not in the order of the model."""
    last, first = model[2].parameters(), model[0].parameters()
    optimizer = torch.optim.AdamW([{"params": last, "lr": 2 * lr}, {"params": first}], lr=lr)
    for _ in range(num_steps):
        model[2](model[0](torch.ones(1, 3)).bfloat16()).sum().backward()
        optimizer.step()
    return optimizer


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    expected = other.state_dict()["state"]
    assert one.state_dict()["state"].keys() == expected.keys()
    for number, slots in one.state_dict()["state"].items():
        for name, value in slots.items():
            assert value.dtype == expected[number][name].dtype
            assert torch.equal(value, expected[number][name]), (number, name)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, torch.nn.Module, torch.optim.Optimizer]:
    """Return a trainer's checkpoint, its model and its optimizer."""
    model = make_model()
    optimizer = make_adam(model, num_steps=2)
    objects = ModelsAndOptimizers(rank=0, models=[model], optimizers=[optimizer])
    state = objects.shared_state()
    directory = tmp_path / "trained"
    directory.mkdir()
    save_state(state.pop("models")[0], directory, "model_0")
    save_state(state.pop("optimizers")[0], directory, "optimizer_0")
    counts = {"version": STATE_VERSION, "num_models": 1, "num_optimizers": 1}
    save_state({**state, **counts}, directory, "training")
    return directory, model, optimizer


def test_the_library_loads_an_exported_optimizer(
    trained: tuple[Path, torch.nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    directory, model, optimizer = trained
    export_dcp(directory, tmp_path / "dcp", optimizer=0)
    fresh = make_model(1)
    other = make_adam(fresh, lr=0.1)
    state = {"model": fresh.state_dict(), "optimizer": get_optimizer_state_dict(fresh, other)}
    alone(dcp.load, state, tmp_path / "dcp")
    set_optimizer_state_dict(fresh, other, state["optimizer"])
    assert_alike(fresh, model)
    assert_same_state(other, optimizer)
    assert [group["lr"] for group in other.param_groups] == [1.0, 0.5]
    # And back, where options stay as they are.
    again = make_adam(fresh, lr=0.1)
    load_optimizer_state(again, fresh, tmp_path / "dcp")
    assert_same_state(again, optimizer)
    assert [group["lr"] for group in again.param_groups] == [0.2, 0.1]


def test_an_optimizer_that_the_library_has_saved_is_begun_with(
    trained: tuple[Path, torch.nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    _, model, optimizer = trained
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    alone(dcp.save, state, tmp_path / "saved")
    other = make_adam(make := make_model(1))
    load_optimizer_state(other, make, tmp_path / "saved", key="optim")
    assert_same_state(other, optimizer)
    with pytest.raises(CheckpointMismatchError, match=r"under 'app' must hold .* with optim\."):
        load_optimizer_state(other, make, tmp_path / "saved", key="app")
    with pytest.raises(CheckpointMismatchError, match="not the model's"):
        load_optimizer_state(other, model, tmp_path / "saved", key="optim")


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.fixture
def stored_adam(tmp_path: Path) -> Path:
    """Return a directory with the state of AdamW for two layers."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    step_once(model, optimizer)
    alone(dcp.save, {"optimizer": get_optimizer_state_dict(model, optimizer)}, tmp_path / "adam")
    return tmp_path / "adam"


@pytest.mark.parametrize(
    ("sizes", "make", "message"),
    [
        (
            (4, 4),
            torch.optim.AdamW,
            r"'exp_avg' of '0\.weight' is \[3, 3\] there and \[4, 4\] here",
        ),
        (
            (3, 1),
            torch.optim.AdamW,
            r"'exp_avg' of '1\.weight' is \[3, 3\] there and \[1, 3\] here",
        ),
        (
            (3, 3),
            lambda some: torch.optim.SGD(some, momentum=0.5),
            r"keeps \['momentum_buffer'\] of each parameter, but for '0\.weight' it holds \['exp",
        ),
        ((3, 3), torch.optim.SGD, r"SGD, which keeps nothing of each parameter, but for '0\.weig"),
        ((3, 3), torch.optim.RMSprop, r"keeps \['square_avg', 'step'\] of each"),
        ((3, 3), torch.optim.ASGD, r"keeps \['ax', 'eta', 'mu', 'step'\] of each"),
        ((3, 3), torch.optim.Adagrad, r"keeps \['step', 'sum'\] of each"),
        ((3, 3), lambda some: torch.optim.Adam(some, amsgrad=True), r"'max_exp_avg_sq', 'step'\]"),
        (
            (3,),
            torch.optim.AdamW,
            r"of AdamW alone, but it holds that of \['1\.bias', '1\.weight'\]",
        ),
        (
            (3, 3, 3),
            torch.optim.AdamW,
            r"not for \['2\.weight', '2\.bias'\]. Hint: load it into the",
        ),
    ],
)
def test_the_state_of_another_optimizer_or_model_is_refused(
    stored_adam: Path, sizes: tuple[int, ...], make: Callable[..., Any], message: str
) -> None:
    ends = zip((sizes[0], *sizes), sizes, strict=False)
    model = torch.nn.Sequential(*(torch.nn.Linear(*each) for each in ends))
    optimizer = make(model.parameters())
    before = {key: dict(slots) for key, slots in optimizer.state.items()}
    with pytest.raises(CheckpointMismatchError, match=message):
        load_optimizer_state(optimizer, model, stored_adam)
    assert optimizer.state == before


def test_an_optimizer_without_a_state_is_begun_with(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    step_once(model, optimizer)
    alone(dcp.save, {"optimizer": get_optimizer_state_dict(model, optimizer)}, tmp_path / "sgd")
    load_optimizer_state(optimizer, model, tmp_path / "sgd")
    assert not optimizer.state
    with pytest.raises(
        CheckpointMismatchError, match=r"under 'app' must hold .* begin with optimizer\."
    ):
        load_optimizer_state(optimizer, model, tmp_path / "sgd", key="app")
    with pytest.raises(CheckpointMismatchError, match="Hint: `key` is the name under which"):
        load_optimizer_state(torch.optim.AdamW(model.parameters()), model, tmp_path / "sgd")


class _OwnOptimizer(torch.optim.SGD):
    """Not of torch: its step may do anything."""

    def step(self, closure: Any = None) -> None:
        raise AssertionError


def test_an_optimizer_of_the_user_takes_what_is_there(stored_adam: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = _OwnOptimizer(model.parameters())
    load_optimizer_state(optimizer, model, stored_adam)
    assert optimizer.state[model[0].weight].keys() == {"exp_avg", "exp_avg_sq", "step"}


def test_hooks_and_schedulers_do_not_see_the_check(stored_adam: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("it has stepped"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    load_optimizer_state(optimizer, model, stored_adam)
    assert optimizer.state[model[0].weight]["step"] == 1
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.last_epoch == 0


def test_an_optimizer_whose_names_are_not_known_is_not_exported(
    trained: tuple[Path, torch.nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    directory, _, _ = trained
    with pytest.raises(CheckpointMismatchError, match=r"must be 0.*but got 1"):
        export_dcp(directory, tmp_path / "dcp", optimizer=1)
    training = directory / "training.json"
    training.write_text(training.read_text().replace("model_0.2.bias", "model_1.bias"))
    with pytest.raises(CheckpointMismatchError, match=r"but they are those of models 0, 1\."):
        export_dcp(directory, tmp_path / "dcp", optimizer=0)
    training.write_text(training.read_text().replace("model_0.", "model_1."))
    with pytest.raises(CheckpointMismatchError, match="those of model 1. Hint: --model 1, or"):
        export_dcp(directory, tmp_path / "dcp", optimizer=0)
    training.write_text(training.read_text().replace('"model_1.bias"', "null"))
    with pytest.raises(CheckpointMismatchError, match="parameters of no model have no names"):
        export_dcp(directory, tmp_path / "dcp", optimizer=0)
    assert not (tmp_path / "dcp").exists()
