"""Capture and restore of models, optimizers, schedulers, buffers, gradients."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline._base.arguments_and_errors import mix_seed
from paceline._training.engine.checkpoints.resume_differences import (
    SettingChanges,
    frozen_parameters,
)
from paceline._training.engine.checkpoints.tensor_reader import (
    StoredTensor,
    fit_stored_tensor,
    whole,
)
from paceline._training.engine.lr_schedulers import scheduler_state
from paceline._training.engine.model_preparation import FrozenBase, base_problem
from paceline._training.engine.tensor_copies_and_digests import (
    is_sharded,
    named_parameters,
    parameters_of,
)
from paceline.data._order_and_random_generators import (
    capture_random_state,
    restore_random_state,
    seed_everything,
)
from paceline.storage._checkpoint_errors import CheckpointMismatchError

logger = logging.getLogger(__name__)

Gradients = Sequence[torch.Tensor | None]


def own_buffers(model: torch.nn.Module, *, is_chief: bool) -> dict[str, torch.Tensor]:
    """Return the buffers missing from the chief's stored model state."""
    buffers = dict(model.named_buffers())
    shared = model.state_dict().keys() if is_chief and buffers else ()
    return {name: buffer for name, buffer in buffers.items() if name not in shared}


def load_buffers(model: torch.nn.Module, stored: Mapping[str, torch.Tensor]) -> None:
    """Restore buffers returned by `own_buffers`; unknown names are ignored."""
    for name, buffer in list(model.named_buffers()):
        value = fit_stored_tensor(stored.get(name), buffer)
        if value is None:
            continue
        if not torch.nn.parameter.is_lazy(buffer) and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            # Buffer of another shape, for example a grown cache: replaced, not copied into.
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, value.to(buffer.device, buffer.dtype))


def load_gradients(parameters: Iterable[torch.nn.Parameter], gradients: Gradients | None) -> None:
    """Put back gradients, in the order of the parameters; None for none at all."""
    known = iter(gradients or ())
    for parameter in parameters:
        gradient = next(known, None)
        parameter.grad = (
            None
            if gradient is None
            else fit_stored_tensor(gradient, parameter).to(parameter.device)
        )


def summed_gradients(by_rank: Iterable[Gradients | None]) -> list[torch.Tensor | None] | None:
    """Return the sum of the gradients of all ranks, taken rank by rank; None if nobody has any."""
    total: list[torch.Tensor | None] | None = None
    for gradients in by_rank:
        if gradients is None:
            continue
        if total is None:
            total = list(gradients)
            continue
        for index, gradient in enumerate(gradients):
            before = total[index]
            total[index] = gradient if before is None else _sum(before, gradient)
    return total


def restore_generators(stored: Any, *, seed: int, num_steps: int, rank: int) -> None:
    """Put back the generators, or seed them where this rank has none; as the last of all.

    Args:
        stored: What `capture_random_state` returned on this rank, or None.
        seed: The seed of the training.
        num_steps: The number of batches or steps so far.
        rank: The rank.
    """
    if stored is not None:
        restore_random_state(stored)
    else:
        # Two ranks must not draw the same numbers.
        seed_everything(mix_seed(seed, num_steps), rank)


def _sum(first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    return first if second is None else first + second


# Prefix added to parameter names by torch.compile.
COMPILED = "_orig_mod."
_NUM_SHOWN = 5


class ModelMismatchError(CheckpointMismatchError, RuntimeError):
    """Error for a checkpoint of another model; also a RuntimeError, as raised by torch."""


def check_numbers(kind: str, stored: Sequence[Any], present: Sequence[Any]) -> None:
    """Check the number of stored objects of a kind against the present number.

    Raises:
        CheckpointMismatchError: There are others.
    """
    if len(stored) != len(present):
        raise CheckpointMismatchError(
            f"The checkpoint must hold as many {kind}s as are trained here, but it holds"
            f" {len(stored)}, and here are {len(present)}. Hint: go on with the code that stored"
            " it."
        )


def load_models(
    models: Sequence[torch.nn.Module],
    states: Sequence[dict[str, Any]],
    bases: Sequence[Mapping[str, Any] | None] = (),
) -> None:
    """Put back models.

    Args:
        models: The models.
        states: Their states.
        bases: What stands for the parameters that were left out of each, if any were.

    Raises:
        CheckpointMismatchError: Numbers, names or shapes differ; the message says which.
    """
    check_numbers("model", states, models)
    for index, (model, state) in enumerate(zip(models, states, strict=True)):
        _load_model(model, state, index, bases[index] if bases else None)


def _load_model(
    model: torch.nn.Module, state: dict[str, Any], index: int, base: Mapping[str, Any] | None
) -> None:
    if base is not None:
        state = {**state, **_base_parameters(model, base, index)}
    present = model.state_dict()
    missing, unknown = sorted(present.keys() - state.keys()), sorted(state.keys() - present.keys())
    shapes = [
        f"{name!r} is {list(state[name].shape)} there and {list(value.shape)} here"
        for name, value in present.items()
        if name in state and state_shape(value) not in (None, state_shape(state[name]))
    ]
    problems = [f"it lacks {_some(missing)}"] if missing else []
    problems += [f"it has {_some(unknown)} besides"] if unknown else []
    problems += [", ".join(shapes[:_NUM_SHOWN]) + _more(shapes)] if shapes else []
    if problems:
        hint = "go on with the model that was trained"
        if any(COMPILED in name for name in {*missing} ^ {*unknown}):
            # torch.compile gives the parameters other names, `wrap_model(compile=True)` does not.
            hint = (
                "one of the two models was compiled by `torch.compile` itself; compile with"
                " `compile=True` of `wrap_model`, which keeps the names"
            )
        raise ModelMismatchError(
            f"The checkpoint is of another model {index}: {'; '.join(problems)}. Hint: {hint}."
        )
    try:
        model.load_state_dict(
            {name: fit_stored_tensor(v, present.get(name)) for name, v in state.items()}
        )
    except RuntimeError as error:
        raise ModelMismatchError(f"The checkpoint is of another model {index}: {error}") from error


def _base_parameters(
    model: torch.nn.Module, base: Mapping[str, Any], index: int
) -> dict[str, torch.Tensor]:
    """Return the model's own values of the parameters left out of a checkpoint."""
    problem = base_problem(model, base)
    if problem is not None:
        name = "" if base["name"] is None else f" ({base['name']})"
        raise ModelMismatchError(
            f"The checkpoint holds only what was trained of model {index}, which must be built on"
            f" the same base{name}, but {problem}. Hint: load the weights of the base before"
            " `context.wrap_model`."
        )
    present = model.state_dict()
    return {name: present[name] for name in base["parameters"]}


def _some(names: list[str]) -> str:
    return f"{names[:_NUM_SHOWN]}{_more(names)}"


def _more(names: list[str]) -> str:
    num_more = len(names) - _NUM_SHOWN
    return f" and {num_more} more" if num_more > 0 else ""


def state_shape(value: Any) -> Any:
    """Return a tensor's shape; None where there is none to compare, as before a first batch."""
    if isinstance(value, StoredTensor):
        return value.shape
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return value.shape


# Types of most values in a state: a set lookup avoids a call for each.
_DETACHED = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass(frozen=True, kw_only=True)
class ModelsAndOptimizers:
    """Models, optimizers and schedulers trained by a rank.

    Attributes:
        rank: The rank; the chief's models are the common state.
        models: The models.
        optimizers: The optimizers.
        schedulers: The schedulers of the optimizers.
        scaler: The gradient scaler, if there is one.
        parameters: Those whose gradients are kept: the models' and optimizers', each once.
        bases: For each model the weights to leave out, or None; may be empty.
        data_rank: The rank among those that train on other samples each; `rank` by default.
        has_sums: Whether gradients of divided parameters are sums over the ranks at any time, as
            FSDP has them. Pieces of a tensor-parallel plan are each group's own.
    """

    rank: int
    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    schedulers: Sequence[Any] = ()
    scaler: Any = None
    parameters: Sequence[torch.nn.Parameter] = ()
    bases: Sequence[FrozenBase | None] = ()
    data_rank: int | None = None
    has_sums: bool = True

    def shared_state(self) -> dict[str, Any]:
        """Return the state common to all ranks."""
        models = [_model_state(model) for model in self.models]
        # A walk through a model takes as long as all the rest here.
        named = [named_parameters(model) for model in self.models]
        names = _parameter_names(named)
        loose = [each.detach() for each in self.parameters if id(each) not in names]
        return {
            **self._leave_bases_out(models),
            "models": models,
            "frozen": [[name for name, p in each if not p.requires_grad] for each in named],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "optimizer_types": _types(self.optimizers),
            "optimizer_parameters": [
                [names.get(id(each)) for each in parameters_of(optimizer)]
                for optimizer in self.optimizers
            ],
            **({"loose_parameters": loose} if loose else {}),
            "schedulers": [scheduler_state(scheduler) for scheduler in self.schedulers],
            "scheduler_types": _types(self.schedulers),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "sharded_gradients": self._gradients(sharded=True),
        }

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank alone.

        There are gradients in the middle of a window of several batches, and wherever the user
        leaves some for a later batch.
        """
        return {
            "random": capture_random_state(),
            "buffers": [own_buffers(each, is_chief=self.rank == 0) for each in self.models],
            "gradients": self._gradients(sharded=False),
        }

    def _gradients(self, *, sharded: bool) -> list[torch.Tensor | None] | None:
        """Return the gradients of sharded parameters, or of the others; None for none at all."""
        gradients = [
            each.grad if each.grad is not None and self._has_sum(each) == sharded else None
            for each in self.parameters
        ]
        return gradients if any(each is not None for each in gradients) else None

    def load_shared_state(self, state: Mapping[str, Any], changes: SettingChanges) -> None:
        """Restore a state returned by `shared_state`, with changed settings applied.

        Raises:
            CheckpointMismatchError: Numbers, names, shapes or types differ; the message says which.
        """
        check_numbers("optimizer", state["optimizers"], self.optimizers)
        check_numbers("scheduler", state["schedulers"], self.schedulers)
        _check_types("optimizer", state["optimizer_types"], self.optimizers)
        _check_types("scheduler", state["scheduler_types"], self.schedulers)
        load_models(self.models, state["models"], state.get("bases", ()))
        self._check_parameters(state["optimizer_parameters"])
        for index, frozen in enumerate(state["frozen"]):
            _freeze(self.models[index], changes.in_frozen(frozen, index))
        for index, optimizer in enumerate(self.optimizers):
            _load_optimizer(optimizer, state["optimizers"][index], index, changes)
        self._load_loose(state.get("loose_parameters", ()))
        for index, scheduler in enumerate(self.schedulers):
            changes.load_scheduler(scheduler, state["schedulers"][index], index)
        self._load_scaler(state["scaler"])

    def _check_parameters(self, stored: Sequence[Sequence[str | None]]) -> None:
        """Raise CheckpointMismatchError for an optimizer with its parameters in another order.

        An optimizer's own state has no names.
        """
        names = _parameter_names([named_parameters(model) for model in self.models])
        for index, (some, optimizer) in enumerate(zip(stored, self.optimizers, strict=False)):
            there = [_plain_name(name) for name in some]
            here = [_plain_name(names.get(id(each))) for each in parameters_of(optimizer)]
            if there == here or len(there) != len(here):
                continue  # The check of its parameter groups reports other numbers.
            changed = [(one, two) for one, two in zip(there, here, strict=True) if one != two]
            text = (
                f"Optimizer {index} must have the parameters of the checkpoint in their order, but"
                f" {changed[0][1]!r} is now where {changed[0][0]!r} was"
            )
            if sorted(there) == sorted(here):
                raise CheckpointMismatchError(
                    f"{text}. Hint: build the optimizer as the code did that stored it."
                )
            if self.rank == 0:
                logger.warning("%s: it goes on with the state of that one.", text)

    def _load_loose(self, stored: Sequence[torch.Tensor]) -> None:
        """Restore parameters known to optimizers only."""
        names = _parameter_names([named_parameters(model) for model in self.models])
        loose = [each for each in self.parameters if id(each) not in names]
        if not stored:
            return
        there, here = ([list(each.shape) for each in some] for some in (stored, loose))
        if there != here:
            raise CheckpointMismatchError(
                "The parameters that optimizers have besides those of models must be those of the"
                f" checkpoint, but their shapes are {there} there and {here} here. Hint: go on with"
                " the code that stored it."
            )
        with torch.no_grad():
            for parameter, value in zip(loose, stored, strict=True):
                parameter.copy_(fit_stored_tensor(value, parameter))

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Restore a state returned by `own_state`, except the generators, restored last."""
        for model, buffers in zip(self.models, own["buffers"] or (), strict=False):
            load_buffers(model, buffers)
        load_gradients(self.parameters, own["gradients"])
        stored = own.get("sharded_gradients") or ()
        data_rank = self.rank if self.data_rank is None else self.data_rank
        for parameter, gradient in zip(self.parameters, stored, strict=False):
            # Sums over all ranks: only the chief takes them if models are no longer sharded.
            if gradient is not None and (data_rank == 0 or self._has_sum(parameter)):
                parameter.grad = fit_stored_tensor(gradient, parameter).to(parameter.device)

    def _has_sum(self, parameter: torch.nn.Parameter) -> bool:
        """Tell whether a parameter's gradient is a sum over the ranks at any time."""
        return self.has_sums and is_sharded(parameter)

    def _leave_bases_out(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Remove frozen base parameters from the models' states, and return their facts."""
        facts: list[dict[str, Any] | None] = []
        for model, base, state in zip(self.models, self.bases, states, strict=False):
            facts.append(None if base is None else base.leave_out(model, state))
        return {"bases": facts} if any(facts) else {}

    def _load_scaler(self, state: Mapping[str, Any] | None) -> None:
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)
        elif (self.scaler is not None or state is not None) and self.rank == 0:
            logger.warning(
                "The checkpoint has %s gradient scaler, and this training has %s: it goes on with"
                " another precision.",
                "no" if state is None else "a",
                "none" if self.scaler is None else "one",
            )


# Prefixes added to parameter names by torch's wrappers, and absent from states.
_WRAPPED = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", COMPILED)


def _plain_name(name: str | None) -> str:
    for part in _WRAPPED:
        name = (name or "").replace(part, "")
    return name or "a parameter of no model"


def _parameter_names(named: Sequence[Sequence[tuple[str, torch.nn.Parameter]]]) -> dict[int, str]:
    """Return the checkpoint name of each parameter of models, by the parameter's `id`.

    Args:
        named: The named parameters of each model.
    """
    return {
        id(parameter): f"model_{index}.{name}"
        for index, each in enumerate(named)
        for name, parameter in each
    }


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state of a model; training pauses meanwhile."""
    # Overridden method: may return anything, so no fast path.
    if type(model).state_dict is not torch.nn.Module.state_dict:
        return dict(model.state_dict())
    # Sharded values stay attached: detaching them takes longer than the rest of a small state.
    state = model.state_dict(keep_vars=True)
    return {
        name: value.detach()
        if type(value) in _DETACHED or (isinstance(value, torch.Tensor) and not is_sharded(value))
        else value
        for name, value in state.items()
    }


def _check_types(kind: str, stored: list[str], present: Sequence[Any]) -> None:
    for index, (expected, found) in enumerate(zip(stored, present, strict=False)):
        if type(found).__name__ != expected:
            raise CheckpointMismatchError(
                f"The checkpoint's {kind} {index} must be of the same type as the one here, but"
                f" it is a {expected}, and here is a {type(found).__name__}."
            )


def _freeze(model: torch.nn.Module, names: Collection[str]) -> None:
    """Have just these parameters not trained, as a hook may have frozen or thawed some since."""
    changed = sorted({*names} ^ {*frozen_parameters(model)})
    for name, parameter in model.named_parameters():
        if name in changed:
            parameter.requires_grad_(name not in names)
    if changed:
        logger.info("Frozen or thawed, as they were when the checkpoint was stored: %s", changed)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], index: int, changes: SettingChanges
) -> None:
    stored = [len(group["params"]) for group in state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if stored != present:
        raise CheckpointMismatchError(
            f"The checkpoint's optimizer {index} must have the parameter groups of the one here,"
            f" but they hold {stored} parameters, and these hold {present}."
        )
    try:
        changed = changes.in_optimizer(state, index)
    except ValueError as error:
        raise CheckpointMismatchError(str(error)) from error
    optimizer.load_state_dict(
        {**changed, "state": divided_optimizer_states(changed["state"], optimizer)}
    )


def divided_optimizer_states(
    states: Mapping[Any, Any], optimizer: torch.optim.Optimizer
) -> dict[Any, Any]:
    """Return the states of parameters, each tensor divided as its parameter is."""
    divided = dict(states)
    for index, parameter in enumerate(parameters_of(optimizer)):
        # An optimizer may keep something else under names of its own.
        if isinstance(state := states.get(index), dict):
            divided[index] = {
                name: fit_stored_tensor(value, parameter)
                if state_shape(value) == parameter.shape
                else whole(value)
                for name, value in state.items()
            }
    return divided


def _types(objects: Iterable[Any]) -> list[str]:
    return [type(each).__name__ for each in objects]
