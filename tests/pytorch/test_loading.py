"""Trials and weights from a checkpoint, outside training."""

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline import pytorch
from paceline.storage import CheckpointCorruptError

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch


class Net(nn.Module):
    def __init__(self, width, is_tied=True):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if is_tied:
            self.second.weight = self.first.weight
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.num_calls += 1
        return self.second(self.first(x))


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context, scale=1.0):
        self.context = context
        self.scale = scale
        self.batch_size = context.get_per_slot_batch_size()
        self.folder = context.get_data_config().get("folder")
        self.model = context.wrap_model(Net(*map(context.get_hparam, ("width", "is_tied"))))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 1),
            pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH,
        )
        context.wrap_reducer(sum, "total")

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"mean": batch[0].mean()}

    def build_training_data_loader(self):
        return DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4)

    def build_validation_data_loader(self):
        return DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=4)


def train(**changes):
    hparams = {"global_batch_size": 4, "width": 3, "is_tied": True, **changes}
    with pytorch.init(hparams=hparams, seed=1) as context:
        trial = Trial(context)
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(2))
        return trial, result.run_dir / "checkpoints" / result.checkpoints[-1]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module of the user's with a trial, importable from `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "model_of_mine.py").write_text(MODULE)
    yield __import__("model_of_mine")
    sys.modules.pop("model_of_mine", None)


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_trial_is_built_as_it_was_trained(module: Any) -> None:
    trained, path = module.train()
    loaded: Any = pytorch.load_trial_from_checkpoint_path(path)
    assert type(loaded) is module.Trial
    assert same_weights(loaded.model, trained.model)
    assert loaded.model.first.weight is loaded.model.second.weight
    assert loaded.context.get_hparams() == {
        "global_batch_size": 4,
        "width": 3,
        "is_tied": True,
    }
    assert (loaded.batch_size, loaded.context.device.type) == (4, "cpu")
    assert loaded.optimizer.state_dict()["state"] == {}
    with pytest.raises(RuntimeError, match=r"`context.core.train` needs a run"):
        _ = loaded.context.core.train


def test_arguments_of_init_and_a_class_can_be_given(module: Any) -> None:
    _, path = module.train()

    class Other(module.Trial):  # type: ignore[misc, name-defined]
        pass

    loaded: Any = pytorch.load_trial_from_checkpoint_path(str(path), Other, {"scale": 2.0})
    assert (type(loaded), loaded.scale) == (Other, 2.0)


def test_hyperparameters_that_are_no_plain_data_are_missed_and_named(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = module.train(function=len, nested={"sizes": [1, 2.5, None]})
    with caplog.at_level(logging.WARNING):
        loaded: Any = pytorch.load_trial_from_checkpoint_path(path)
    assert "no values of the hyperparameters function" in caplog.text
    assert loaded.context.get_hparam("nested") == {"sizes": [1, 2.5, None]}


def test_class_that_is_gone_tells_how_to_go_on(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = module.train()
    with monkeypatch.context() as patch:
        patch.delattr(module, "Trial")
        with pytest.raises(ImportError, match="must be importable, but is not: .*'Trial'"):
            pytorch.load_trial_from_checkpoint_path(path)
    monkeypatch.delitem(sys.modules, "model_of_mine")
    (tmp_path / "model_of_mine.py").write_text("import a_package_that_is_missing")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'a_package_that_is_missing'"):
        pytorch.load_trial_from_checkpoint_path(path)
    (tmp_path / "model_of_mine.py").unlink()
    with pytest.raises(ImportError, match="No module named 'model_of_mine'. Hint: .* PYTHONPATH"):
        pytorch.load_trial_from_checkpoint_path(path)


def test_class_of_a_function_must_be_given(module: Any) -> None:
    class Local(module.Trial):  # type: ignore[misc, name-defined]
        pass

    module.Trial = Local
    _, path = module.train()
    with pytest.raises(ImportError, match=r"Local was defined in a function.*trial_class=Local"):
        pytorch.load_trial_from_checkpoint_path(path)


@pytest.mark.parametrize("kind", [dict, "Trial", ModuleType("x")])
def test_what_is_no_trial_is_refused(module: Any, kind: Any) -> None:
    _, path = module.train()
    with pytest.raises(TypeError, match="must be a PyTorchTrial, but got"):
        pytorch.load_trial_from_checkpoint_path(path, kind)


def test_other_model_is_refused_with_the_names_that_differ(module: Any) -> None:
    _, path = module.train()

    class Other(module.Trial):  # type: ignore[misc, name-defined]
        def __init__(self, context: Any) -> None:
            self.model = context.wrap_model(nn.Linear(3, 3))

    with pytest.raises(pytorch.CheckpointMismatchError, match=r"lacks \['bias', 'weight'\]"):
        pytorch.load_trial_from_checkpoint_path(path, Other)


def test_what_is_no_trainers_checkpoint_is_refused(tmp_path: Path) -> None:
    for load in (
        pytorch.load_trial_from_checkpoint_path,
        pytorch.load_weights_from_checkpoint_path,
    ):
        with pytest.raises(pytorch.CheckpointMismatchError, match="has no training.json"):
            load(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(pytorch.CheckpointMismatchError, match=r"load_weights reads .* a train fun"):
        pytorch.load_weights_from_checkpoint_path(tmp_path)


def test_truncated_weights_are_named(module: Any) -> None:
    _, path = module.train()
    file = path / "model_0.safetensors"
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointCorruptError, match=r"model_0.safetensors in .* must be whole"):
        pytorch.load_weights_from_checkpoint_path(path)


def test_weights_come_under_all_names_of_tied_ones(module: Any) -> None:
    trained, path = module.train()
    weights = pytorch.load_weights_from_checkpoint_path(path)
    assert weights.keys() == trained.model.state_dict().keys()
    assert weights["first.weight"] is weights["second.weight"]
    plain = module.Net(3)
    missing, unknown = plain.load_state_dict(load_file(path / "model_0.safetensors"), strict=False)
    assert (missing, unknown) == (["second.weight"], [])
    assert same_weights(plain, trained.model)
    with pytest.raises(pytorch.CheckpointMismatchError, match="must be 0, .* but got 1"):
        pytorch.load_weights_from_checkpoint_path(path, model=1)


def test_every_file_and_key_is_in_the_documentation(module: Any) -> None:
    _, path = module.train()
    names = {re.sub(r"(?<=_)\d+", "<i>", file.name) for file in path.iterdir()}
    names = {re.sub("rank_<i>", "rank_<r>", name).replace("rank-0", "rank-<n>") for name in names}
    for part in ("training", "rank_0"):
        names |= json.loads((path / f"{part}.json").read_text()).keys()
    document = DOCUMENT.read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in document] == []


@pytest.fixture
def scripted(tmp_path: Path, run_with_torch: Callable[..., Any]) -> Path:
    """Return the checkpoint of a script that defines its trial itself."""
    done = run_with_torch(f"{MODULE}\nprint(train(is_tied=False)[1])", name="train.py")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_trial_of_a_script_needs_its_class_and_its_weights_need_no_paceline(
    scripted: Path, tmp_path: Path, module: Any
) -> None:
    with pytest.raises(ImportError, match=r"Trial was defined in train.py. Hint: .*trial_class="):
        pytorch.load_trial_from_checkpoint_path(scripted)
    loaded: Any = pytorch.load_trial_from_checkpoint_path(scripted, module.Trial)

    shutil.copytree(scripted, tmp_path / "CHECKPOINT")
    classes = MODULE.replace("from paceline import pytorch", "").partition("class Trial")[0]
    code = f"import sys\nfrom safetensors.torch import load_file\n{classes}\n"
    code += "model = Net(3, is_tied=False)\n"
    code += "model.load_state_dict(load_file('CHECKPOINT/model_0.safetensors'))\n"
    code += "print(model.first.bias.tolist(), 'paceline' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{loaded.model.first.bias.tolist()} False\n", done.stderr
