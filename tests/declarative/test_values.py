"""Configs as JSON and YAML: what is kept, what is left out, and what is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core import list_runs
from paceline.declarative import (
    ModelParameters,
    RunFileError,
    TotalVariationLoss,
    TrainingConfig,
    load_run,
)
from paceline.declarative._hyperparameters import with_hyperparameters
from paceline.declarative._run_yaml import main

MakeConfig = Callable[..., TrainingConfig]


@dataclasses.dataclass
class Parameters(ModelParameters):
    sizes: tuple[int, ...] = (1,)
    activation: type = nn.ReLU
    name: str = "007"


def written(config: TrainingConfig, **changes: Any) -> Path:
    config.dump_to_json("configs.json")
    data = json.loads(Path("configs.json").read_text())
    Path("configs.json").write_text(json.dumps({**data, **changes}))
    return Path("configs.json")


def test_everything_but_data_comes_back(make_config: MakeConfig) -> None:
    config = make_config(
        model_params=Parameters(sizes=(3, 4)),
        loss_function=[
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1),
            nn.HuberLoss(delta=2.5),
            TotalVariationLoss(weight=1000),
        ],
        optimizer=torch.optim.AdamW,
        optimizer_params={"betas": [0.8, 0.9]},
        loss_weights=[1, 2, 3.5],
        post_training_epoch_hook=test_everything_but_data_comes_back,
    )
    found = TrainingConfig()
    found.load_from_json(
        written(config), namespace=globals(), allowed_modules=["tests", "conftest"]
    )
    assert found.dataset is None
    for name in (*("optimizer", "optimizer_params", "loss_weights", "pred_names_and_types"),):
        assert getattr(found, name) == getattr(config, name)
    assert found.model_params == config.model_params
    classes, huber, variation = found.loss_function
    assert classes.weight.tolist() == [1.0, 2.0, 3.0]
    assert (classes.label_smoothing, huber.delta, variation.weight) == (0.1, 2.5, 1000)
    assert found.post_training_epoch_hook is test_everything_but_data_comes_back


def test_what_cannot_be_written_is_named_in_the_file(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(loss_function=[nn.L1Loss(), lambda pred, label: pred.mean()])
    left_out = json.loads(written(config).read_text())["left_out"]
    assert left_out["dataset"] == "an object of TensorDataset"
    assert "<lambda> cannot be imported" in left_out["loss_function"]
    namespace = {"Net": config.model_class, "NetParameters": type(config.model_params)}
    TrainingConfig().load_from_json("configs.json", namespace=namespace)
    assert "`loss_function` was not written" in caplog.text
    assert "`dataset`" not in caplog.text


def test_fields_that_a_file_does_not_name_stay() -> None:
    config = TrainingConfig(num_epochs=7)
    Path("configs.json").write_text('{"random_seed": 3, "load_pretrained_classifer": true}')
    config.load_from_json("configs.json")
    assert (config.num_epochs, config.random_seed) == (7, 3)
    assert config.load_pretrained_classifier


REFUSED: list[tuple[str, str]] = [
    ('{"num_epoch": 3}', r"no field 'num_epoch'.*did you mean `num_epochs`"),
    ('{"num_epochs": "3"}', r"`num_epochs` must be an integer, but got '3'"),
    ('{"optimizer": "os.system"}', r"`optimizer` must come from an allowed module.*'os.system'"),
    ('{"optimizer": "torch.optim.Nothing"}', r"torch.optim has no 'Nothing'"),
    ('{"optimizer": {"class": "torch.hub.load"}}', r"must not name 'torch.hub.load'"),
    ('{"optimizer": "Adam"}', r"must name a module and a name in it, but got 'Adam'"),
    ('{"loss_function": {"object": "torch.load", "arguments": {"f": "x"}}}', r"not for training"),
    ('{"loss_function": {"function": "torch:os.system"}}', r"must not name 'torch:os.system'"),
    ('{"optimizer": "torch.nothing.Adam"}', r"there is no module 'torch.nothing'"),
    ('{"loss_function": {"object": "torch.nn.L1Loss", "arguments": {"a": 1}}}', r"argument 'a'"),
    ('{"parallelization_params": {"a": 1}}', r"`parallelization_params` has no field 'a', only"),
    ('{"model_params": {"config_class": "torch.nn.Linear"}}', r"must name a config class"),
    ("[1]", r"options of TrainingConfig must be a map, but got \[1\]"),
    ("{", r"must be a JSON file"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_file_is_refused_with_the_field_and_the_reason(text: str, message: str) -> None:
    Path("configs.json").write_text(text)
    config = TrainingConfig()
    with pytest.raises((ValueError, TypeError), match=message):
        config.load_from_json("configs.json")
    assert config == TrainingConfig(loss_function=config.loss_function)


# ---- YAML ------------------------------------------------------------------------------------

MODULE = """
import torch
from torch.utils.data import TensorDataset


class Data(TensorDataset):
    def __init__(self, size):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
        super().__init__(x, x.sum(1, keepdim=True))


class Net(torch.nn.Linear):
    def __init__(self, num_inputs):
        super().__init__(num_inputs, 1)
"""

RUN = """
model_class: own_code.Net
model_params: {num_inputs: 4}
dataset: {object: own_code.Data, arguments: {size: 40}}
pred_names: [sum]
loss_function: {object: torch.nn.HuberLoss, arguments: {delta: 2.0}}
optimizer: torch.optim.AdamW
optimizer_params: {weight_decay: 1e-3}
num_epochs: 2
batch_size_per_process: 8
model_save_dir: out
"""


def test_a_run_is_written_as_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    Path("own_code.py").write_text(MODULE)
    Path("run.yaml").write_text(RUN)
    config = load_run("run.yaml", overrides=["num_epochs=3", "model_params.num_inputs=5"])
    assert (config.num_epochs, config.model_params.values()) == (3, {"num_inputs": 5})
    assert config.model_class.__name__ == "Net"
    assert len(config.dataset) == 40
    assert config.loss_function.delta == 2.0
    for text, message in (
        ("own_code.Nothing", r"run.yaml must describe a run, but: .*own_code has no 'Nothing'"),
        ("subprocess.run", r"must come from an allowed module"),
    ):
        Path("run.yaml").write_text(RUN.replace("own_code.Net", text))
        with pytest.raises(RunFileError, match=message):
            load_run("run.yaml")
    Path("run.yaml").write_text("config_class: Other")
    with pytest.raises(RunFileError, match=r"TrainingConfig or PretrainingConfig, but got 'Other'"):
        load_run("run.yaml")


def test_the_program_trains_a_yaml_file(run_with_torch: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text(MODULE)
    (tmp_path / "small run.yaml").write_text(RUN)
    code = "import runpy; runpy.run_module('paceline.declarative', run_name='__main__')"
    result = run_with_torch(code, "small run.yaml", "num_epochs=1")
    assert result.returncode == 0, result.stderr
    assert "Epoch 1: loss" in result.stderr
    assert Path("out/final_model.pth").exists()
    assert json.loads(Path("out/configs.json").read_text())["num_epochs"] == 1
    (run,) = list_runs(Path("paceline_runs"))
    assert run.name == "small-run"


@pytest.mark.slow
def test_the_program_says_what_is_wrong_with_a_file(
    run_with_torch: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("epochs: 3")
    code = "import runpy; runpy.run_module('paceline.declarative', run_name='__main__')"
    result = run_with_torch(code, "run.yaml")
    assert result.returncode == 1
    assert "paceline.declarative: error: run.yaml must describe a run, but:" in result.stderr
    assert "Traceback" not in result.stderr


# ---- hyperparameters -------------------------------------------------------------------------


def test_hyperparameters_take_the_place_of_fields(make_config: MakeConfig) -> None:
    config = make_config(optimizer_params={"weight_decay": 0.1})
    found = with_hyperparameters(
        config,
        {
            "learning_rate_per_process": 0.5,
            "optimizer": "torch.optim.SGD",
            "optimizer_params": {"momentum": 0.9},
            "model_params.width": 9,
            "parallelization_params": {"data_parallel": "fsdp", "shard_units": 100},
        },
    )
    assert (found.learning_rate_per_process, found.optimizer) == (0.5, torch.optim.SGD)
    assert found.optimizer_params == {"weight_decay": 0.1, "momentum": 0.9}
    assert found.model_params.values() == {"width": 9, "dropout": 0.0}
    assert found.parallelization_params.data_parallel == "fsdp"
    assert found.parallelization_params.shard_units == 100
    assert config.model_params.values()["width"] == 6
    assert config.optimizer_params == {"weight_decay": 0.1}
    for hparams, message in (
        ({"lr": 0.1}, r"hyperparameter 'lr' must be a field: .*no field 'lr'"),
        ({"model_params.depth": 1}, r"'model_params.depth' must be a field, but NetParameters has"),
        ({"optimizer_params.lr": 1}, r"without 'lr'"),
    ):
        with pytest.raises(ValueError, match=message):
            with_hyperparameters(config, hparams)


def test_an_argument_without_a_value_is_told_how_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run.yaml", "num_epochs"])
    assert left.value.code == 2
    assert "'num_epochs' must be a field and its value, such as num_epochs=5" in (
        capsys.readouterr().err
    )
