"""Configs as JSON and YAML: what is kept, what is left out, and what is refused."""

import dataclasses
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core import list_runs
from paceline.declarative import (
    InferenceConfig,
    ModelParameters,
    RunFileError,
    TotalVariationLoss,
    TrainingConfig,
    load_run,
)
from paceline.declarative._config_object import with_hyperparameters
from paceline.declarative._trainer_and_tester import main

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
    found, path = TrainingConfig(), written(config)
    assert '"paceline.declarative.TotalVariationLoss"' in path.read_text()
    found.load_from_json(path, namespace=globals(), allowed_modules=["tests", "conftest"])
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


# ---- files of generic_trainer ----------------------------------------------------------------


class OwnLoss(nn.Module):
    def forward(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (pred - label).abs().mean()


# As generic_trainer writes it; the script had defined its model and parameters itself.
EARLIER = {
    "model_class": "<class '__main__.OwnLoss'>",
    "model_params": {"width": 7, "config_class": "NetParameters"},
    "dataset": "<__main__.Samples object at 0x7f85d27bbc90>",
    "pred_names_and_types": [["phase", "cls"], ["energy", "regr"]],
    "dataset_creator_name": None,
    "data_label_separation_index": 1,
    "debug": False,
    "parallelization_params": {
        "find_unused_parameters": False,
        "parallelization_type": "multi_node",
        "config_class": "ParallelizationConfig",
    },
    "batch_size_per_process": 8,
    "learning_rate_per_process": 1e-05,
    "optimizer": "<class 'torch.optim.adamw.AdamW'>",
    "optimizer_params": {"weight_decay": 0.01},
    "scheduler": "<class 'torch.optim.lr_scheduler.CyclicLR'>",
    "model_save_dir": "007",
    "load_pretrained_classifer": False,
    "post_training_epoch_hook": "<function hook at 0x7f85d27bbc90>",
    "loss_function": ["CrossEntropyLoss()", "OwnLoss(\n  (inner): L1Loss()\n)"],
    "loss_weights": 1.0,
    "loss_tracker_params": {
        "require_cs_labels": False,
        "config_class": "LossTrackerParameters",
    },
    "config_class": "TrainingConfig",
}


def test_a_config_of_generic_trainer_is_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    Path("configs.json").write_text(json.dumps(EARLIER))
    config = TrainingConfig(num_epochs=7)
    config.load_from_json("configs.json", namespace=globals())
    assert config.model_class is OwnLoss
    assert config.model_params.values() == {"width": 7}
    assert (config.optimizer, config.scheduler) == (
        torch.optim.AdamW,
        torch.optim.lr_scheduler.CyclicLR,
    )
    assert [type(loss) for loss in config.loss_function] == [nn.CrossEntropyLoss, OwnLoss]
    assert config.parallelization_params.parallelization_type == "multi_node"
    assert (config.model_save_dir, config.learning_rate_per_process) == ("007", 1e-05)
    assert (config.num_epochs, config.dataset) == (7, None)
    assert "`post_training_epoch_hook` was not written (<function hook at" in caplog.text
    assert "OwnLoss has its default arguments" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss_function": "MyLoss()"},
            r"is 'MyLoss\(\)' in the file .* no class 'MyLoss' is known",
        ),
        ({"model_class": "<class 'os.system'>"}, "must come from an allowed module"),
        (
            {"model_class": "<class '__main__.Other'>"},
            "__main__ has no 'Other'. Hint: name the module",
        ),
    ],
)
def test_what_generic_trainer_does_not_tell_is_named(changes: Any, message: str) -> None:
    Path("configs.json").write_text(json.dumps({**EARLIER, **changes}))
    with pytest.raises(ValueError, match=message):
        TrainingConfig().load_from_json("configs.json", namespace={"OwnLoss": OwnLoss})


@pytest.mark.parametrize("is_beside", [True, False])
def test_inference_takes_the_config_of_a_training(make_config: MakeConfig, is_beside: bool) -> None:
    config = make_config(model_save_dir="elsewhere", batch_size_per_process=4)
    written(config).rename("run.json")
    if is_beside:
        Path("best_model.pth").touch()
    found = InferenceConfig(prediction_output_path="mine")
    namespace = {"Net": config.model_class, "NetParameters": type(config.model_params)}
    found.load_from_json("run.json", namespace=namespace)
    assert found.pretrained_model_path == f"{'' if is_beside else 'elsewhere/'}best_model.pth"
    assert (found.model_class, found.batch_size_per_process) == (config.model_class, 4)
    assert found.prediction_output_path == "mine"
    # Its own files are read as they are.
    found.dump_to_json("inference.json")
    again = InferenceConfig()
    again.load_from_json("inference.json", namespace=namespace)
    assert again.pretrained_model_path == found.pretrained_model_path


# ---- YAML ------------------------------------------------------------------------------------

MODULE = """
import torch
from torch.utils.data import TensorDataset


class Data(TensorDataset):
    def __init__(self, size):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
        super().__init__(x, x.sum(1, keepdim=True))


class Numbers(Data):
    def __getitem__(self, index):
        return self.tensors[0][index], float(index)


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


def run_program(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run the program in this process, and return the message with which it ends."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.argv", ["paceline.declarative", *arguments])
    for name in ("own_code", "own_mistakes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module("paceline.declarative", run_name="__main__")
    return str(left.value.code)


def test_the_config_that_a_run_has_written_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_code.py").write_text(MODULE)
    Path("run.yaml").write_text(RUN + "learning_rate_per_process: 0.00001")
    assert run_program(monkeypatch, "run.yaml", "num_epochs=1") == "0"
    hint = "names 'own_code.Net'. Hint: --allow own_code if you trust it."
    assert hint in run_program(monkeypatch, "out/configs.json")
    again = ("out/configs.json", "--allow", "own_code", "model_save_dir=again")
    assert run_program(monkeypatch, *again) == "0"
    files = [json.loads(Path(name, "configs.json").read_text()) for name in ("out", "again")]
    assert files[0]["dataset"] == {"object": "own_code.Data", "arguments": {"size": 40}}
    assert files[1] == {**files[0], "model_save_dir": "again"}


# Arguments of the program, and what it says.
MISTAKES: list[tuple[str, str]] = [
    ("missing.yaml", "must exist, but missing.yaml does not"),
    (".", r"\. must be a file that describes a run"),
    ("latin.yaml", "latin.yaml must be text in UTF-8"),
    ("broken.json", "broken.json must be JSON, but is not"),
    ("list.json", r"list.json must hold a map of fields, but holds \[1\]"),
    ("model_class=null", "`model_class` is missing"),
    ("model_class=nowhere.Net", "names 'nowhere.Net'. Hint: --allow nowhere if you trust it"),
    ("model_params.depth=2", "`model_params` must be arguments of Net"),
    ("dataset=null", "`dataset`, or both of a split data set, is missing"),
    ("dataset.arguments.size=1", "`validation_ratio` must leave samples for training"),
    ("data_label_separation_index=5", "must have labels from item 5 on"),
    ("leading_sample_axis=true", "`training_dataset` has no axis"),
    ("pred_names=[sum,more]", "The model must return 2 predictions"),
    ("loss_function=[]", "`loss_function` must be a loss or a list of at least one"),
    ("optimizer_params.foo=2", "`optimizer_params` must be arguments of AdamW"),
    ("optimizer=torch.optim.LBFGS optimizer_params={}", "LBFGS needs a closure"),
    ("scheduler=torch.optim.lr_scheduler.StepLR", "`scheduler_params` must be arguments of StepLR"),
    ("scheduler_params.foo=2", "`scheduler_params` must be arguments of CyclicLR"),
    ('multi_optimizer_param_dicts=[{"params":"tail"}]', "must name parts of the model, but 'tail'"),
    ("model_save_dir=latin.yaml", "`model_save_dir` must be a directory, but got 'latin.yaml'"),
    ("checkpoint_dir=earlier", "was written by torch.save, as generic_trainer does. Hint: `pretr"),
    ("checkpoint_dir=missing", "`checkpoint_dir` must be the `model_save_dir` of an earlier run"),
    ("checkpoint_storage=ftp://x/y", "`checkpoint_storage` must be a path, a URL"),
    ("checkpoint_storage=latin.yaml", "`checkpoint_storage` must be a directory"),
    ("pretrained_model_path=.", r"`pretrained_model_path` must be a file of weights, but '\.'"),
    ("pretrained_model_path=latin.yaml", "`pretrained_model_path` must be a file of weights, but"),
    ("load_pretrained_encoder_only=true", "needs `pretrained_model_path`"),
]


@pytest.mark.parametrize(("argument", "message"), MISTAKES)
def test_the_program_says_in_a_sentence_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, argument: str, message: str
) -> None:
    Path("own_code.py").write_text(MODULE)
    Path("run.yaml").write_text(RUN)
    Path("latin.yaml").write_bytes("pred_names: [größe]".encode("latin-1"))
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[1]")
    Path("earlier").mkdir()
    torch.save({"current_epoch": 1}, "earlier/checkpoint.state")
    if argument == "leading_sample_axis=true":
        Path("run.yaml").write_text(RUN.replace("own_code.Data", "own_code.Numbers"))
    arguments = ("run.yaml", *argument.split()) if "=" in argument else (argument,)
    said = run_program(monkeypatch, *arguments)
    assert said.startswith("paceline.declarative: error: ")
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(said)


@pytest.mark.parametrize("line", ["raise ValueError('mine')", "open('missing')", "def ("])
def test_the_program_shows_where_code_of_ones_own_has_failed(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    Path("own_mistakes.py").write_text(f"{MODULE}\n{line}\n")
    Path("run.yaml").write_text(RUN.replace("own_code", "own_mistakes"))
    with pytest.raises((ValueError, OSError, SyntaxError), match=r"^mine|missing|invalid syntax"):
        run_program(monkeypatch, "run.yaml")


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
