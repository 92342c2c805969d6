"""Config objects: what they refuse, and what they say then."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

from paceline.declarative import (
    InferenceConfig,
    ModelParameters,
    ParallelizationConfig,
    PretrainingConfig,
    SymmetricNegativeCosineSimilarity,
    Trainer,
    TrainingConfig,
)
from paceline.declarative._parts_from_config import mixed_precision_policy_of

MakeConfig = Callable[..., TrainingConfig]

WRONG_VALUES: list[tuple[str, Any, type[Exception], str]] = [
    ("model_class", nn.Linear(1, 1), TypeError, r"must be a subclass of torch.*model_class=Linear"),
    ("model_class", int, TypeError, r"must be a subclass of torch.nn.modules.module.Module, but"),
    ("model_params", {"width": 3}, TypeError, r"of ModelParameters, .*\.of\(\{'width': 3\}\)"),
    ("dataset", [].__len__, TypeError, r"a data set with .*lacks __getitem__|lacks `?__len__"),
    ("dataset", TensorDataset, TypeError, r"dataset=TensorDataset\(\.\.\.\)"),
    ("pred_names", "phase", TypeError, r"a list of names, but got 'phase'. Hint: pred_names=\["),
    ("pred_names", ["a", "a"], ValueError, r"each once, but got \['a', 'a'\]"),
    ("pred_names_and_types", ["a"], TypeError, r"pairs \(name, kind\), but got \['a'\]"),
    ("pred_names_and_types", [("a", "x")], ValueError, r"one of 'cls', 'regr', but got 'x'"),
    ("optimizer", "adam", TypeError, r"a subclass of torch.optim.*but got 'adam'.*AdamW"),
    ("optimizer_params", {"lr": 0.2}, ValueError, r"without 'lr'.*learning_rate_per_process=0.2"),
    ("multi_optimizer_param_dicts", [{"lr": 1.0}], ValueError, r"whose 'params' names a part"),
    ("scheduler", nn.Linear, TypeError, r"a subclass of torch.optim.lr_scheduler"),
    ("scheduler_step", "epochs", ValueError, r"one of 'batch', 'step', 'epoch', but got 'epochs'"),
    ("loss_function", nn.L1Loss, TypeError, r"a loss object.*but got L1Loss. Hint: .*L1Loss\(\)"),
    ("loss_function", [nn.L1Loss(), nn.MSELoss], TypeError, r"`loss_function\[1\]`.*MSELoss\(\)"),
    ("loss_function", [], ValueError, r"a list of at least one, but got \[\]"),
    ("loss_weights", [1, "2"], TypeError, r"`loss_weights\[1\]` must be a number, but got '2'"),
    ("validation_ratio", 0, ValueError, r"between 0 and 1, both excluded, but got 0\."),
    ("validation_ratio", 1.0, ValueError, r"between 0 and 1, both excluded, but got 1.0"),
    ("batch_size_per_process", 0, ValueError, r"at least 1, but got 0"),
    ("batch_size_per_process", 8.0, TypeError, r"an integer, but got 8.0"),
    ("num_epochs", True, TypeError, r"an integer, but got True"),
    ("learning_rate_per_process", float("nan"), ValueError, r"a finite number, but got nan"),
    ("learning_rate_per_process", -1, ValueError, r"above 0, but got -1"),
    ("task_type", "regress", ValueError, r"'regression' or both, but got 'regress'"),
    ("cpu_only", 1, TypeError, r"True or False, but got 1"),
    ("random_seed", -1, ValueError, r"at least 0, but got -1"),
    ("post_training_epoch_hook", 3, TypeError, r"a function, but got 3"),
    ("model_save_dir", "", ValueError, r"text that is not empty"),
    ("mixed_precision_type", "fp8", ValueError, r"one of 'fp16', 'bf16', but got 'fp8'"),
    ("early_stopping_patience", 0, ValueError, r"at least 1, but got 0"),
    ("parallelization_params", None, TypeError, r"an object of ParallelizationConfig"),
]


@pytest.mark.parametrize(("name", "value", "kind", "message"), WRONG_VALUES)
def test_a_wrong_value_is_refused_by_name_at_construction_and_when_it_is_set(
    name: str, value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as told:
        TrainingConfig(**{name: value})
    assert f"`{name}" in str(told.value)
    config = TrainingConfig()
    before = getattr(config, name)
    with pytest.raises(kind, match=message):
        setattr(config, name, value)
    assert getattr(config, name) is before


def test_a_wrong_parallelization_type_is_named() -> None:
    with pytest.raises(ValueError, match=r"'single_node', 'multi_node', but got 'xx'"):
        ParallelizationConfig(parallelization_type="xx")


@pytest.mark.parametrize("value", ["all", True, [], [3]])
def test_units_of_sharding_are_classes_a_number_or_a_function(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`shard_units` must be a module class or several, a num"):
        ParallelizationConfig(data_parallel="fsdp", shard_units=value)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("shard_precision", {"dtype": 1}, "a MixedPrecisionPolicy, or a dictionary of param_dtype"),
        ("shard_precision", {"param_dtype": "half4"}, 'a type, such as "bfloat16", but got'),
        ("tensor_plan", {"up": 1}, "`tensor_plan` must map names of modules to styles"),
        ("compile", "eager", "True, False or a dictionary"),
        ("trainable_only", 3, "True, False or the name of the base"),
    ],
)
def test_options_of_divided_models_are_checked(field: str, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ParallelizationConfig(data_parallel="fsdp", **{field: value})


def test_options_of_divided_models_are_written_and_read(tmp_path: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    given = ParallelizationConfig(
        data_parallel="fsdp", shard_precision=policy, shard_size=2, compile={"backend": "eager"}
    )
    given.dump_to_json(tmp_path / "options.json")
    found = ParallelizationConfig()
    found.load_from_json(tmp_path / "options.json")
    assert found == given
    assert mixed_precision_policy_of(found) == policy


def test_a_field_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    config = TrainingConfig()
    with pytest.raises(AttributeError, match=r"no field 'num_epoch'.*did you mean `num_epochs`"):
        config.num_epoch = 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"no field 'num_epoch'.*did you mean `num_epochs`"):
        TrainingConfig(num_epoch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="`ModelParameters` has no field 'width', only none"):
        ModelParameters(width=3)  # type: ignore[call-arg]


def test_a_constructor_of_ones_own_may_take_what_it_likes() -> None:
    @dataclasses.dataclass
    class Scaled(ModelParameters):
        width: int

        def __init__(self, factor: int, **more: Any) -> None:
            self.width = 3 * factor + sum(more.values())

    assert Scaled(factor=2, extra=1).values() == {"width": 7}
    with pytest.raises(TypeError, match="factor"):
        Scaled()  # type: ignore[call-arg]


def test_model_parameters_must_be_a_dataclass() -> None:
    class Plain(ModelParameters):
        width: int = 3

    with pytest.raises(TypeError, match=r"`Plain` must be a dataclass.*@dataclasses.dataclass"):
        Plain()


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"`model_class` is missing; `pred_names` is missing; `dataset`.* missing"
    ):
        Trainer(TrainingConfig())
    with pytest.raises(ValueError, match=r"is missing beside `training_dataset`"):
        Trainer(TrainingConfig(training_dataset=TensorDataset(torch.zeros(1))))


CONFLICTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss_function": [nn.L1Loss()]}, ValueError, r"each of the 2 predictions phase, energy, but"),
    ({"loss_weights": [1.0]}, ValueError, r"one for each of the 2 losses, but got \[1.0\]"),
    (
        {"loss_function": [nn.L1Loss(), nn.L1Loss(), lambda phase: phase]},
        TypeError,
        r"`loss_function\[2\]` is a regularizer and must take the 2 predictions phase, energy",
    ),
    ({"pred_names": ["x"]}, ValueError, r"`pred_names` must name those of .*but got \('x',\)"),
    ({"model_params": ModelParameters()}, TypeError, r"missing a required argument: 'width'"),
    (
        {"model_params": ModelParameters.of({"width": 2, "depth": 3})},
        TypeError,
        r"`model_params` must be arguments of Net \(.*unexpected keyword argument 'depth'",
    ),
    ({"optimizer_params": {"decay": 1}}, TypeError, r"`optimizer_params`.*argument 'decay'"),
    (
        {"scheduler": torch.optim.lr_scheduler.StepLR, "scheduler_params": {"base_lr": 1}},
        TypeError,
        r"`scheduler_params` must be arguments of StepLR \(step_size, gamma, last_epoch\)",
    ),
    ({"checkpoint_dir": "a", "pretrained_model_path": "b"}, ValueError, r"'a' .*'b' exclude each"),
    (
        {"parallelization_params": ParallelizationConfig(shard_units=nn.Linear)},
        ValueError,
        '`shard_units` has no effect without `data_parallel="fsdp"`',
    ),
    (
        {
            "parallelization_params": ParallelizationConfig(shard_size=2, tensor_parallel_size=2),
            "save_onnx": True,
        },
        ValueError,
        r'`shard_size` has no .*fsdp"`; `save_onnx` and `tensor_parallel_size` exclude',
    ),
    (
        {
            "parallelization_params": ParallelizationConfig(
                data_parallel="fsdp", shard_units=[nn.Linear, nn.Conv1d]
            ),
            "save_onnx": True,
        },
        ValueError,
        '`save_onnx` and `data_parallel="fsdp"` exclude each other',
    ),
    ({"load_pretrained_encoder_only": True}, ValueError, r"needs `pretrained_model_path`"),
    ({"load_pretrained_classifier": True}, ValueError, r"without `load_pretrained_encoder_only`"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), CONFLICTS)
def test_fields_that_do_not_fit_are_refused_before_anything_is_built(
    make_config: MakeConfig, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Trainer(make_config(**changes))


def test_a_trainer_takes_nothing_but_a_config() -> None:
    with pytest.raises(TypeError, match=r"`configs` must be a TrainingConfig, but got \{\}"):
        Trainer({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a data set|a data set with"):
        TrainingConfig(dataset=DataLoader(TensorDataset(torch.zeros(1))))


def test_the_other_configs_have_defaults_of_their_own() -> None:
    pretraining = PretrainingConfig()
    assert isinstance(pretraining.loss_function, SymmetricNegativeCosineSimilarity)
    assert pretraining.data_label_separation_index is None
    assert InferenceConfig().batch_size_per_process == 64


# A change of the fields edits this list: users' files name them.
FIELDS = """
    model_class model_params dataset pred_names pred_names_and_types dataset_creator_name
    data_label_separation_index leading_sample_axis debug cpu_only random_seed
    parallelization_params task_type training_dataset validation_dataset test_dataset
    batch_size_per_process num_epochs learning_rate_per_process optimizer optimizer_params
    multi_optimizer_param_dicts scheduler scheduler_params scheduler_step model_save_dir
    checkpoint_storage checkpoint_dir pretrained_model_path
    load_pretrained_encoder_only load_pretrained_classifier
    validation_ratio post_training_epoch_hook post_validation_epoch_hook post_test_epoch_hook
    loss_function loss_weights loss_tracker_params num_workers pin_memory_for_dataloader
    automatic_mixed_precision mixed_precision_type gradient_clip_norm gradient_clip_value
    accumulation_steps early_stopping_patience save_onnx stop_on_nan check_ranks
    verify_steps on_mismatch curriculum_learning_rate
"""


def test_the_fields_of_a_training_are_these() -> None:
    assert [field.name for field in dataclasses.fields(TrainingConfig)] == FIELDS.split()


@dataclasses.dataclass
class DeepParameters(ModelParameters):
    width: int = 3
    names: list[str] = dataclasses.field(default_factory=list)
    depth: int = 2


def test_inherited_fields_can_be_removed(tmp_path: Any) -> None:
    @DeepParameters.remove("depth")
    @dataclasses.dataclass
    class FlatParameters(DeepParameters):
        rate: float = 0.5

    flat = FlatParameters(width=5)
    assert flat.values() == {"width": 5, "names": [], "rate": 0.5}
    assert repr(flat).endswith("FlatParameters(width=5, names=[], rate=0.5)")
    assert flat == FlatParameters(width=5)
    assert flat.names is not FlatParameters().names
    with pytest.raises(TypeError, match="has no field 'depth', only width, names, rate"):
        FlatParameters(depth=1)
    with pytest.raises(AttributeError, match="has no field 'depth', only width, names, rate"):
        flat.depth = 1
    path = tmp_path / "flat.json"
    flat.dump_to_json(path)
    read = FlatParameters()
    read.load_from_json(path)
    assert read == flat
    assert DeepParameters(depth=4).values()["depth"] == 4


def test_fields_are_removed_from_what_is_a_dataclass_already() -> None:
    with pytest.raises(TypeError, match=r"above `@dataclasses.dataclass`, but `Other` is no"):

        @dataclasses.dataclass
        @DeepParameters.remove("depth")
        class Other(DeepParameters):
            rate: float = 0.5


@pytest.mark.parametrize("name", ["hight", "rate"])
def test_only_inherited_fields_can_be_removed(name: str) -> None:
    with pytest.raises(ValueError, match=rf"inherits \(width, names, depth\), but got '{name}'"):

        @DeepParameters.remove(name)
        @dataclasses.dataclass
        class OtherParameters(DeepParameters):
            rate: float = 0.5
