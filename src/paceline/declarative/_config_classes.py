"""Config classes of a run: model, data, training method and place."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline._base import arguments_and_errors as arguments
from paceline._base.arguments_and_errors import optional
from paceline.declarative import _config_field_checks as checks
from paceline.declarative._config_object import OptionContainer, new_option, option
from paceline.declarative._losses import SymmetricNegativeCosineSimilarity

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
