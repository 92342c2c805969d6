"""Config objects: typed fields, hyperparameters, files, and the config classes of a run."""

import dataclasses
import difflib
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from paceline._base import arguments_and_errors as arguments
from paceline._base.arguments_and_errors import Check, optional
from paceline._base.files import replacing_atomically
from paceline.declarative import _config_values as checks
from paceline.declarative import _losses as _loss_classes
from paceline.declarative._config_values import JsonReader, JsonWriter, ObjectFinder
from paceline.declarative._losses import SymmetricNegativeCosineSimilarity

logger = logging.getLogger(__name__)


_CLASS = re.compile(r"<class '([\w.]+)'>")
_CALL = re.compile(r"([A-Za-z_]\w*)\(.*\)", re.DOTALL)
_OBJECT = re.compile(r"<.* at 0x[0-9a-f]+>", re.DOTALL)
_CONFIG_CLASS, _LEFT_OUT = "config_class", "left_out"


def is_earlier(data: Any) -> bool:
    """Return whether a config was written by generic_trainer."""
    if not isinstance(data, Mapping):
        return False
    inner = [value for value in data.values() if isinstance(value, Mapping)]
    names = [value[_CONFIG_CLASS] for value in inner if _CONFIG_CLASS in value]
    texts = [value for value in data.values() if isinstance(value, str)]
    has_plain_names = any("." not in str(name) for name in names)
    return has_plain_names or any(_CLASS.fullmatch(t) or _OBJECT.fullmatch(t) for t in texts)


def taken_over(data: Mapping[str, Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of generic_trainer converted to this package's format.

    Args:
        data: Data that generic_trainer has written.
        namespace: Where classes are looked for that it names without a module.

    Raises:
        ValueError: A loss cannot be found.
    """
    left_out: dict[str, str] = {}
    found: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, str) and _OBJECT.fullmatch(value):
            left_out[name] = value
        elif name == "loss_function":
            found[name] = _losses(value, namespace)
        elif name != _CONFIG_CLASS:
            found[name] = _plain(value, namespace)
    return {**found, _LEFT_OUT: left_out} if left_out else found


def _plain(value: Any, namespace: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and (match := _CLASS.fullmatch(value)):
        return {"class": match[1]}
    if isinstance(value, list):
        return [_plain(item, namespace) for item in value]
    if not isinstance(value, Mapping):
        return value
    plain = {k: _plain(each, namespace) for k, each in value.items() if k != _CONFIG_CLASS}
    # Without the class at hand, parameters need none.
    kind = namespace.get(value.get(_CONFIG_CLASS, ""))
    if isinstance(kind, type):
        plain[_CONFIG_CLASS] = f"{kind.__module__}:{kind.__qualname__}"
    return plain


def _losses(value: Any, namespace: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_losses(item, namespace) for item in value]
    match = _CALL.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return _plain(value, namespace)
    kind = namespace.get(match[1]) or getattr(nn, match[1], getattr(_loss_classes, match[1], None))
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(
            f"`loss_function` is {value!r} in the file of generic_trainer, but no class"
            f" {match[1]!r} is known. Hint: pass namespace=globals() where it is imported, or set"
            " `loss_function`."
        )
    logger.warning(
        "`loss_function`: %s has its default arguments, as generic_trainer writes none.", match[1]
    )
    return {"object": f"{kind.__module__}:{kind.__qualname__}"}


_CHECK, _LEFT_OUT_KEY, _SOURCES = "check", "left_out", "_sources"
_PACKAGE = "paceline.declarative"
# Fields that hold a class may name it by its import path alone.
_CLASS_FIELDS = ("model_class", "optimizer", "scheduler")
_OTHER_NAMES = {"load_pretrained_classifer": "load_pretrained_classifier"}
_Kind = TypeVar("_Kind", bound="OptionContainer")


def option(default: Any, check: Check) -> Any:
    """Return a field of a config class with a check of its values.

    Args:
        default: The default.
        check: Called with the name and the value when the field is set.
    """
    return dataclasses.field(default=default, metadata={_CHECK: check})


def new_option(factory: Callable[[], Any], check: Check) -> Any:
    """Return a field of a config class with a new default for each object.

    Args:
        factory: Makes the default.
        check: Called with the name and the value when the field is set.
    """
    return dataclasses.field(default_factory=factory, metadata={_CHECK: check})


@dataclasses.dataclass
class OptionContainer:
    """Base class of configs: options as fields, checked on every assignment.

    Subclasses are dataclasses too.
    """

    def __new__(cls: type[_Kind], *_args: Any, **given: Any) -> _Kind:
        """Refuse unknown fields.

        Raises:
            TypeError: The class has no such field.
        """
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        for name in () if takes_any else given:
            if name not in parameters and "__dataclass_fields__" in vars(cls):
                raise TypeError(_unknown(cls, name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse a subclass without the dataclass decorator: its fields would be lost.

        Raises:
            TypeError: It is none.
        """
        kind = type(self)
        if "__dataclass_fields__" not in vars(kind) and kind.__dict__.get("__annotations__"):
            raise TypeError(
                f"`{kind.__name__}` must be a dataclass, but is a plain class. Hint: write"
                " @dataclasses.dataclass above it."
            )

    @staticmethod
    def remove(*names: str) -> Callable[[type[_Kind]], type[_Kind]]:
        """Return a decorator of a config class to drop inherited fields.

        Use it if a parameter class inherits a field that its model does not accept. Write it above
        `@dataclasses.dataclass`.

        Args:
            names: The fields to drop.

        Raises:
            TypeError: The class is no dataclass yet.
            ValueError: The class has no such field, or one of its own has that name.
        """

        def without(kind: type[_Kind]) -> type[_Kind]:
            if "__dataclass_fields__" not in vars(kind):
                raise TypeError(
                    f"`remove` must be above `@dataclasses.dataclass`, but `{kind.__name__}` is no"
                    " dataclass yet, which would bring the fields back. Hint: swap the two lines."
                )
            own = vars(kind).get("__annotations__", {})
            for name in names:
                if name not in kind.__dataclass_fields__ or name in own:
                    inherited = ", ".join(n for n in kind.__dataclass_fields__ if n not in own)
                    raise ValueError(
                        f"`remove` must name fields that `{kind.__name__}` inherits"
                        f" ({inherited or 'it has none'}), but got {name!r}."
                    )
            kept = [each for each in dataclasses.fields(kind) if each.name not in names]
            # Dataclass of the kept fields only: its generated methods replace the old ones.
            made = dataclasses.make_dataclass(
                kind.__name__,
                [(each.name, each.type, _like(each)) for each in kept],
                namespace={"__post_init__": kind.__post_init__},
            )
            for made_name in ("__init__", "__repr__", "__eq__", "__dataclass_fields__"):
                setattr(kind, made_name, getattr(made, made_name))
            return kind

        return without

    def __setattr__(self, name: str, value: Any) -> None:
        field = type(self).__dataclass_fields__.get(name)
        if field is None:
            raise AttributeError(_unknown(type(self), name))
        check = field.metadata.get(_CHECK)
        object.__setattr__(self, name, value if check is None else check(name, value))

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.values().items())

    def values(self) -> dict[str, Any]:
        """Return the fields as they are, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def get_serializable_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON, as `dump_to_json` writes them."""
        data = JsonWriter().fields_of(self)
        left_out = data.pop(_LEFT_OUT_KEY, {})
        for name, (value, source) in vars(self).get(_SOURCES, {}).items():
            if name in left_out and value is getattr(self, name):
                data[name] = source
                del left_out[name]
        return {**data, _LEFT_OUT_KEY: left_out} if left_out else data

    def dump_to_json(self, filename: str | os.PathLike[str]) -> None:
        """Write the fields to a file; fields without a plain form are listed in "left_out".

        Data sets and objects without an import path, such as a lambda, are left out. Losses are
        written by their class and the arguments of its constructor.

        Args:
            filename: The file; it is replaced as a whole.
        """
        with replacing_atomically(Path(filename)) as file:
            file.write_text(json.dumps(self.get_serializable_dict(), indent=2) + "\n")

    def load_from_json(
        self,
        filename: str | os.PathLike[str],
        namespace: Mapping[str, Any] | None = None,
        *,
        allowed_modules: Iterable[str] = (),
    ) -> None:
        """Set the fields present in a file; the others stay unchanged.

        No code comes from the file. Classes and functions are found by their import path, in
        torch, Paceline, the main script, `namespace` and `allowed_modules`, and nowhere else.

        Args:
            filename: A file that `dump_to_json` wrote.
            namespace: Where to look first, such as `globals()`; it is not changed.
            allowed_modules: Packages and modules that may be imported as well.

        Raises:
            ValueError: It is no JSON, names an unknown field, or a module that is not allowed.
            TypeError: A value has the wrong type.
        """
        try:
            data = json.loads(Path(filename).read_text())
        except ValueError as error:
            raise ValueError(f"`filename` must be a JSON file, but {filename}: {error}.") from error
        data = self.of_file(data, Path(filename))
        self.load_dict(data, namespace=namespace, allowed_modules=allowed_modules)

    def of_file(self, data: Any, path: Path) -> Any:
        """Return a file's data adapted to this class; subclasses may override."""
        return data

    def load_dict(
        self,
        data: Any,
        *,
        namespace: Mapping[str, Any] | None = None,
        allowed_modules: Iterable[str] = (),
    ) -> None:
        """Set the fields present in plain data, as `load_from_json` does.

        Raises:
            ValueError: A field is unknown, or a module is not allowed.
            TypeError: A value has the wrong type.
        """
        self.load_found(data, ObjectFinder(namespace or {}, tuple(allowed_modules), _PACKAGE))

    def load_found(self, data: Any, finder: ObjectFinder) -> None:
        """Set the fields present in plain data; a finder resolves classes and functions.

        Raises:
            ValueError: A field is unknown, or a module is not allowed.
            TypeError: A value has the wrong type.
        """
        if is_earlier(data):
            data = taken_over(data, finder.namespace)
        found = JsonReader(finder, _CLASS_FIELDS, _OTHER_NAMES).fields(self, data)
        for name in found:
            if name not in type(self).__dataclass_fields__:
                raise ValueError(_unknown(type(self), name))
        for name, value in found.items():
            setattr(self, name, value)
        # Plain data as read are kept, to write them back if a value has no plain form.
        vars(self)[_SOURCES] = {
            **vars(self).get(_SOURCES, {}),
            **{name: (found[name], data[name]) for name in found.keys() & data.keys()},
        }


def _unknown(kind: type[OptionContainer], name: str) -> str:
    known = [field.name for field in dataclasses.fields(kind)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        return f"`{kind.__name__}` has no field {name!r}. Hint: did you mean `{close[0]}`?"
    return f"`{kind.__name__}` has no field {name!r}, only {', '.join(known) or 'none'}."


def _like(field: "dataclasses.Field[Any]") -> Any:
    """Return a new field with the options of another."""
    names = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")
    return dataclasses.field(
        **{name: getattr(field, name) for name in names}, metadata=field.metadata
    )


def with_hyperparameters(configs: Any, hparams: Mapping[str, Any]) -> Any:
    """Return a copy of a config with fields replaced by hyperparameters.

    A map changes the fields of a config object, and the entries of a dict, that it names.

    Args:
        configs: The config; it stays as it is.
        hparams: Values by field; a name with dots, such as `model_params.width`, leads into a map.

    Raises:
        ValueError: A hyperparameter is no field.
        TypeError: A value has the wrong type.
    """
    changed = dataclasses.replace(configs)
    for name, value in hparams.items():
        first, *rest = name.split(".")
        for part in reversed(rest):
            value = {part: value}
        current = getattr(changed, first, None)
        if isinstance(current, dict) and isinstance(value, Mapping):
            value = {**current, **value}
        elif isinstance(current, OptionContainer) and isinstance(value, Mapping):
            value = _with_fields(first, current, value)
        try:
            changed.load_dict({first: value} if _is_plain(value) else {})
        except ValueError as error:
            raise ValueError(f"The hyperparameter {name!r} must be a field: {error}") from error
        if not _is_plain(value):
            setattr(changed, first, value)
    return changed


def _with_fields(name: str, current: OptionContainer, value: Mapping[str, Any]) -> OptionContainer:
    known = current.values()
    if unknown := sorted(value.keys() - known.keys()):
        raise ValueError(
            f"The hyperparameter '{name}.{unknown[0]}' must be a field, but"
            f" {type(current).__name__} has only {', '.join(sorted(known))}."
        )
    return dataclasses.replace(current, **value)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (OptionContainer, dict))


_BEST = "best_model.pth"


@dataclasses.dataclass
class ModelParameters(OptionContainer):
    """Arguments of a model's constructor; subclass with a field for each argument."""

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> "ModelParameters":
        """Return parameters with these fields, of a class made for them."""
        fields = [(name, Any) for name in arguments]
        kind = dataclasses.make_dataclass("ModelParameters", fields, bases=(ModelParameters,))
        made: ModelParameters = kind(**arguments)
        return made


@dataclasses.dataclass
class ParallelizationConfig(OptionContainer):
    """How many processes train.

    Attributes:
        parallelization_type: "single_node" for one process, with all its GPUs by `DataParallel`;
            "multi_node" for one process per device, which a launcher starts.
        find_unused_parameters: Kept for older scripts; unused parameters are always allowed.
        data_parallel: How gradients are summed in "multi_node": "flat" after the backward pass,
            "overlapped" with it, or "fsdp" to divide the model among the processes as well. None
            is "overlapped" on GPUs and else "flat".
        shard_units: With "fsdp", which modules are gathered as a whole: a class or a list of
            them, a least number of parameters, or a function of a module. None for the members of
            the model's outermost sequences.
        shard_precision: With "fsdp", the types in which parameters are gathered and gradients are
            summed: torch's `MixedPrecisionPolicy`, which is kept as a dictionary of its fields.
        shard_size: With "fsdp", the number of processes that hold one copy of the model.
        tensor_parallel_size: The number of processes that divide the model by `tensor_plan`, and
            train on the same samples.
        tensor_plan: The plan for torch's `parallelize_module`, or a function of a model and a mesh.
        gradient_checkpointing: Whether blocks are computed again in the backward pass.
        compile: Whether the model is compiled, or the options of `torch.compile`.
        trainable_only: Whether checkpoints leave out frozen parameters; a text names the base.
    """

    parallelization_type: str = option("single_node", arguments.one_of("single_node", "multi_node"))
    find_unused_parameters: bool = option(False, arguments.boolean)
    data_parallel: str | None = option(
        None, optional(arguments.one_of("flat", "overlapped", "fsdp"))
    )
    shard_units: Any = option(None, optional(checks.check_shard_units))
    shard_precision: Any = option(None, optional(checks.check_policy))
    shard_size: int | None = option(None, optional(arguments.count(2)))
    tensor_parallel_size: int = option(1, arguments.count(1))
    tensor_plan: Any = option(None, checks.check_tensor_plan)
    gradient_checkpointing: bool = option(False, arguments.boolean)
    compile: Any = option(False, checks.check_boolean_or(Mapping, "a dictionary"))
    trainable_only: Any = option(False, checks.check_boolean_or(str, "the name of the base"))


@dataclasses.dataclass
class LossTrackerParameters(OptionContainer):
    """Kept for older scripts.

    Attributes:
        require_cs_labels: Not read.
    """

    require_cs_labels: bool = option(False, arguments.boolean)


@dataclasses.dataclass
class Config(OptionContainer):
    """Base class of the configs of training and inference.

    Attributes:
        model_class: The class of the model.
        model_params: The arguments of its constructor.
        dataset: The whole data set, which the trainer splits.
        pred_names: The names of the model's predictions, in their order.
        pred_names_and_types: The same with a kind each: "cls" for classes, "regr" for numbers.
            `pred_names` alone is "cls" where the loss is a cross entropy or another loss of
            classes, else "regr".
        dataset_creator_name: Not read; free for scripts.
        data_label_separation_index: The number of items of a sample that are inputs; labels
            follow. None if there are no labels.
        leading_sample_axis: Whether every tensor of a sample has a first axis of size 1 for the
            samples of a batch. None looks at the first sample, and logs the result.
        debug: Not read; free for subclasses, as `trainer.debug`.
        cpu_only: Whether GPUs are left alone.
        random_seed: The seed; drawn and recorded by default.
        parallelization_params: How many processes train.
        task_type: The kinds of predictions with accuracies: "cls" if it holds
            "classification", "regr" if it holds "regression". None for none.
    """

    model_class: Any = option(
        None,
        optional(
            checks.check_class(lambda: torch.nn.Module, "model_class=MyModel, not MyModel(...).")
        ),
    )
    model_params: ModelParameters = new_option(
        ModelParameters, checks.check_object(ModelParameters)
    )
    dataset: Any = option(None, optional(checks.check_dataset))
    pred_names: Any = option(None, optional(checks.check_names))
    pred_names_and_types: Any = option(None, optional(checks.check_names_and_kinds))
    dataset_creator_name: str | None = option(None, optional(arguments.text))
    data_label_separation_index: int | None = option(1, optional(arguments.count(1)))
    leading_sample_axis: bool | None = option(None, optional(arguments.boolean))
    debug: bool = option(False, arguments.boolean)
    cpu_only: bool = option(False, arguments.boolean)
    random_seed: int | None = option(None, optional(arguments.count(0)))
    parallelization_params: ParallelizationConfig = new_option(
        ParallelizationConfig, checks.check_object(ParallelizationConfig)
    )
    task_type: str | None = option("classification", optional(checks.check_task_type))


@dataclasses.dataclass
class TrainingConfig(Config):
    """A training.

    Attributes:
        training_dataset: Data to train on, with `validation_dataset`, in place of `dataset`.
        validation_dataset: Data to validate on after each epoch.
        test_dataset: Data to evaluate after each epoch; nothing depends on the result.
        batch_size_per_process: Samples of a batch on one process, or on one GPU of `DataParallel`.
        num_epochs: How many epochs to train in all, also when resuming.
        learning_rate_per_process: The learning rate, to be multiplied by the number of processes
            or GPUs, as the batch is.
        optimizer: The class of the optimizer.
        optimizer_params: Its arguments, without `lr`.
        multi_optimizer_param_dicts: The options of parameter groups. Their "params" names a part
            of the model, such as "encoder"; an "lr" is multiplied like the learning rate.
        scheduler: The class of the scheduler of the learning rate; None for a constant one.
        scheduler_params: Its arguments. Without any, `CyclicLR` rises from a tenth of the rate for
            six epochs, falls for six, and halves the rise each time.
        scheduler_step: When it steps: after each "batch", optimizer "step" or "epoch".
            `ReduceLROnPlateau` looks at the validation loss of each epoch.
        model_save_dir: The directory for the run's files.
        checkpoint_storage: Where checkpoints go: a directory, or a URL such as
            "s3://bucket/prefix"; below `model_save_dir` by default. `model_save_dir` still says
            which ones there are.
        checkpoint_dir: The `model_save_dir` of a run to resume from.
        pretrained_model_path: A file of weights to begin with.
        load_pretrained_encoder_only: Whether only the encoder gets these weights, and only the
            other parameters are trained. The encoder is the model's `backbone_model` or `encoder`.
        load_pretrained_classifier: Whether the other parameters get their weights as well then.
        validation_ratio: The part of `dataset` that is validated on.
        post_training_epoch_hook: Called without arguments after each epoch, on every rank.
        post_validation_epoch_hook: The same after each validation.
        post_test_epoch_hook: The same after each evaluation of `test_dataset`.
        loss_function: One loss for all predictions, or a list with one for each of them, followed
            by regularizers, which are called with the predictions.
        loss_weights: The factors of the losses: one number, or one for each.
        loss_tracker_params: Kept for older scripts.
        num_workers: Processes that load data, per process that trains.
        pin_memory_for_dataloader: Whether batches for a GPU are loaded into pinned memory.
        automatic_mixed_precision: Whether the forward pass runs in a shorter number format.
        mixed_precision_type: That format, "fp16" or "bf16".
        gradient_clip_norm: The largest norm of the gradients of a step; None for any.
        gradient_clip_value: The largest absolute value in them; None for any.
        accumulation_steps: Batches per optimizer step.
        early_stopping_patience: Stop after so many epochs without a better validation loss.
        save_onnx: Whether the best and the final model are also written as ONNX.
        stop_on_nan: Whether to stop when the training loss is NaN or infinite.
        check_ranks: Whether processes compare their models, and the settings of their optimizers,
            at the start and with each checkpoint; or the names of tensors that each has for itself.
        verify_steps: Compute the first batch and each batch with a multiple of this number twice,
            and compare the results bit by bit; None for none. Not with a loop of your own.
        on_mismatch: Whether to "stop" at a difference, or to "warn".
        curriculum_learning_rate: Not read; free for subclasses.
    """

    training_dataset: Any = option(None, optional(checks.check_dataset))
    validation_dataset: Any = option(None, optional(checks.check_dataset))
    test_dataset: Any = option(None, optional(checks.check_dataset))
    batch_size_per_process: int = option(64, arguments.count(1))
    num_epochs: int = option(60, arguments.count(1))
    learning_rate_per_process: float = option(1e-3, arguments.positive)
    optimizer: Any = option(
        torch.optim.Adam, checks.check_class(lambda: torch.optim.Optimizer, "torch.optim.AdamW")
    )
    optimizer_params: dict[str, Any] = new_option(dict, checks.check_without_rate)
    multi_optimizer_param_dicts: Any = option(None, optional(checks.check_groups))
    scheduler: Any = option(
        torch.optim.lr_scheduler.CyclicLR,
        optional(
            checks.check_class(
                lambda: torch.optim.lr_scheduler.LRScheduler, "torch.optim.lr_scheduler.StepLR"
            )
        ),
    )
    scheduler_params: dict[str, Any] = new_option(dict, checks.check_mapping)
    scheduler_step: str = option("batch", arguments.one_of("batch", "step", "epoch"))
    model_save_dir: str = option(".", arguments.text)
    checkpoint_storage: str | None = option(None, optional(arguments.text))
    checkpoint_dir: str | None = option(None, optional(arguments.text))
    pretrained_model_path: str | None = option(None, optional(arguments.text))
    load_pretrained_encoder_only: bool = option(False, arguments.boolean)
    load_pretrained_classifier: bool = option(False, arguments.boolean)
    validation_ratio: float = option(0.1, checks.check_ratio)
    post_training_epoch_hook: Callable[[], Any] | None = option(
        None, optional(checks.check_function)
    )
    post_validation_epoch_hook: Callable[[], Any] | None = option(
        None, optional(checks.check_function)
    )
    post_test_epoch_hook: Callable[[], Any] | None = option(None, optional(checks.check_function))
    loss_function: Any = new_option(torch.nn.CrossEntropyLoss, checks.check_losses)
    loss_weights: Any = option(1.0, checks.check_weights)
    loss_tracker_params: LossTrackerParameters = new_option(
        LossTrackerParameters, checks.check_object(LossTrackerParameters)
    )
    num_workers: int = option(0, arguments.count(0))
    pin_memory_for_dataloader: bool = option(True, arguments.boolean)
    automatic_mixed_precision: bool = option(False, arguments.boolean)
    mixed_precision_type: str = option("fp16", arguments.one_of("fp16", "bf16"))
    gradient_clip_norm: float | None = option(None, optional(arguments.positive))
    gradient_clip_value: float | None = option(None, optional(arguments.positive))
    accumulation_steps: int = option(1, arguments.count(1))
    early_stopping_patience: int | None = option(None, optional(arguments.count(1)))
    save_onnx: bool = option(False, arguments.boolean)
    stop_on_nan: bool = option(True, arguments.boolean)
    check_ranks: Any = option(True, arguments.ranks_to_check)
    verify_steps: int | None = option(None, optional(arguments.count(1)))
    on_mismatch: str = option("stop", arguments.one_of("stop", "warn"))
    curriculum_learning_rate: float = option(0.0, arguments.number)


@dataclasses.dataclass
class PretrainingConfig(TrainingConfig):
    """A training without labels: all items of a sample are inputs.

    The loss is called with all predictions, and no accuracy is computed.
    """

    data_label_separation_index: int | None = option(None, optional(arguments.count(1)))
    task_type: str | None = option(None, optional(checks.check_task_type))
    loss_function: Any = new_option(SymmetricNegativeCosineSimilarity, checks.check_losses)


@dataclasses.dataclass
class InferenceConfig(Config):
    """Predictions of a trained model, for `Tester`.

    `load_from_json` takes the configs.json of a training too, with the best model beside it.

    Attributes:
        pretrained_model_path: The file of the weights.
        prediction_output_path: A directory that `Tester.build` makes; None for none.
        batch_size_per_process: Samples of a batch.
        prediction_postprocessor: Called with the tuple of predictions of a batch; returns those to
            keep.
    """

    pretrained_model_path: str | None = option(None, optional(arguments.text))
    prediction_output_path: str | None = option(None, optional(arguments.text))
    batch_size_per_process: int = option(64, arguments.count(1))
    prediction_postprocessor: Any = option(None, optional(checks.check_function))

    def of_file(self, data: Any, path: Path) -> Any:
        """Return the fields for this class from a training's config, with its best model."""
        if not isinstance(data, Mapping) or "model_save_dir" not in data:
            return data
        names = {*type(self).__dataclass_fields__, "left_out", "config_class"}
        known = {name: value for name, value in data.items() if name in names}
        left_out = known.get("left_out") or {}
        known["left_out"] = {name: text for name, text in left_out.items() if name in names}
        beside = path.parent / _BEST
        best = beside if beside.exists() else Path(data["model_save_dir"]) / _BEST
        return {**known, "pretrained_model_path": str(best)}
