"""Checks of the values of config fields."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from paceline._base.arguments_and_errors import Check, number, one_of, positive, text, wrong
from paceline._training.engine.fsdp_and_tensor_parallel import check_plan

_POLICY_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def check_task_type(name: str, value: Any) -> str:
    """Return a checked task type: text with classification, regression or both.

    Raises:
        TypeError: It is no text.
        ValueError: It says neither.
    """
    said = text(name, value)
    if "classification" not in said and "regression" not in said:
        must = "a text with 'classification', 'regression' or both"
        raise ValueError(wrong(name, must, value, "None for no accuracies."))
    return said


def check_ratio(name: str, value: Any) -> float:
    """Return a number between 0 and 1, both excluded.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """
    if not 0 < number(name, value) < 1:
        hint = "a part of the data set; or give `training_dataset` and `validation_dataset`."
        raise ValueError(wrong(name, "between 0 and 1, both excluded", value, hint))
    return float(value)


def check_mapping(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a mapping from names to values.

    Raises:
        TypeError: It is no mapping, or has other keys.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(wrong(name, "a dict with names as keys", value))
    return dict(value)


def check_without_rate(name: str, value: Any) -> dict[str, Any]:
    """Return checked parameters of an optimizer, without the learning rate.

    Raises:
        TypeError: It is no mapping.
        ValueError: It holds `lr`.
    """
    parameters = check_mapping(name, value)
    if "lr" in parameters:
        hint = f"leave it out and set learning_rate_per_process={parameters['lr']!r}."
        raise ValueError(wrong(name, "without 'lr'", parameters, hint))
    return parameters


def check_class(base: Callable[[], type], example: str) -> Check:
    """Return a check for subclasses of a base class; the base is looked up lazily."""

    def check(name: str, value: Any) -> type:
        if not isinstance(value, type):
            is_object = isinstance(value, base())
            hint = f"give the class, {name}={type(value).__name__}." if is_object else example
            raise TypeError(
                wrong(name, f"a subclass of {_class_name_in_field(base())}", value, hint)
            )
        if not issubclass(value, base()):
            raise TypeError(
                wrong(name, f"a subclass of {_class_name_in_field(base())}", value, example)
            )
        return value

    return check


def check_object(kind: type) -> Check:
    """Return a check for an object of a config class."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            makes_fields = isinstance(value, Mapping) and hasattr(kind, "of")
            arguments = f".of({dict(value)!r})" if makes_fields else "(...)"
            hint = f"{name}={kind.__name__}{arguments}"
            raise TypeError(wrong(name, f"an object of {kind.__name__}", value, hint))
        return value

    return check


def check_function(name: str, value: Any) -> Any:
    """Return a checked callable.

    Raises:
        TypeError: It cannot.
    """
    if not callable(value):
        raise TypeError(wrong(name, "a function", value))
    return value


def check_shard_units(name: str, value: Any) -> Any:
    """Return a checked module selector: class or classes, parameter count, or function.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(each, type) for each in value):
            return tuple(value)
    elif not isinstance(value, bool) and (isinstance(value, int) or callable(value)):
        return value
    must = "a module class or several, a number of parameters, or a function of a module"
    raise TypeError(wrong(name, must, value))


def check_policy(name: str, value: Any) -> dict[str, Any]:
    """Return a `MixedPrecisionPolicy` as a dictionary with type names, as in files.

    Raises:
        TypeError: It is neither.
    """
    # Importing the class takes a second.
    if type(value).__name__ == "MixedPrecisionPolicy":
        value = dataclasses.asdict(value)
    must = f"a MixedPrecisionPolicy, or a dictionary of {', '.join(_POLICY_FIELDS)}"
    if not isinstance(value, Mapping) or not value.keys() <= {*_POLICY_FIELDS}:
        raise TypeError(wrong(name, must, value))
    plain = {
        key: str(item).removeprefix("torch.") if isinstance(item, torch.dtype) else item
        for key, item in value.items()
    }
    for key, item in plain.items():
        if not isinstance(getattr(torch, str(item), item), (torch.dtype, bool, type(None))):
            raise TypeError(wrong(f"{name}.{key}", 'the name of a type, such as "bfloat16"', item))
    return plain


def check_tensor_plan(name: str, value: Any) -> Any:
    """Return a tensor-parallel plan, or None.

    Raises:
        TypeError: It is no plan.
    """
    check_plan(value)
    return value


def check_boolean_or(kind: type, must: str) -> Check:
    """Return a check for True, False, or a value of a type."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, (bool, kind)):
            raise TypeError(wrong(name, f"True, False or {must}", value))
        return value

    return check


def check_dataset(name: str, value: Any) -> Any:
    """Return a data set with a length and items by index.

    Raises:
        TypeError: It is a class, or lacks one of the two.
    """
    if isinstance(value, type):
        hint = f"give an object, {name}={value.__name__}(...)."
        raise TypeError(wrong(name, "a data set", value, hint))
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(type(value), method)]
    if missing:
        must = f"a data set with `__len__` and `__getitem__` (it lacks {' and '.join(missing)})"
        raise TypeError(wrong(name, must, value))
    return value


def _check_loss(name: str, value: Any) -> Any:
    if isinstance(value, type):
        hint = f"give an object, {value.__name__}(), as a loss is called with (preds, labels)."
        raise TypeError(wrong(name, "a loss object or a function", value, hint))
    return check_function(name, value)


def check_losses(name: str, value: Any) -> Any:
    """Return a checked loss, or a tuple of checked losses.

    Raises:
        TypeError: One is a class or cannot be called.
        ValueError: There is none.
    """
    if not isinstance(value, (list, tuple)):
        return _check_loss(name, value)
    if not value:
        raise ValueError(wrong(name, "a loss or a list of at least one", value))
    return tuple(_check_loss(f"{name}[{index}]", loss) for index, loss in enumerate(value))


def check_weights(name: str, value: Any) -> Any:
    """Return a checked weight, or a tuple of checked weights.

    Raises:
        TypeError: One is no number.
        ValueError: One is not finite.
    """
    if isinstance(value, (list, tuple)):
        return tuple(number(f"{name}[{index}]", weight) for index, weight in enumerate(value))
    return number(name, value)


def check_names(name: str, value: Any) -> tuple[str, ...]:
    """Return a tuple of different names.

    Raises:
        TypeError: It is no list of texts.
        ValueError: It is empty, or a name stands twice.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(wrong(name, "a list of names", value, f"{name}=[{value!r}]"))
    found = tuple(text(f"{name}[{index}]", item) for index, item in enumerate(value))
    if not found or len(set(found)) < len(found):
        raise ValueError(wrong(name, "at least one name, each once", value))
    return found


def check_names_and_kinds(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Return a tuple of pairs of a name and "cls" or "regr".

    Raises:
        TypeError: It is no list of pairs.
        ValueError: A kind is unknown, or a name stands twice.
    """
    hint = f"{name}=[('energy', 'regr'), ('phase', 'cls')]"
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in value):
        raise TypeError(wrong(name, "a list of pairs (name, kind)", value, hint))
    check_names(name, [pair[0] for pair in value])
    kind = one_of("cls", "regr")
    return tuple((pair[0], kind(f"{name}[{i}][1]", pair[1])) for i, pair in enumerate(value))


def check_groups(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Return the options of the parameter groups of an optimizer.

    Raises:
        TypeError: It is no list of mappings.
        ValueError: One does not say which parameters it is for.
    """
    hint = f"{name}=[{{'params': 'encoder', 'lr': 1e-4}}, {{'params': 'head'}}]"
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError(wrong(name, "a list of dicts", value, hint))
    found = tuple(check_mapping(f"{name}[{index}]", group) for index, group in enumerate(value))
    for index, group in enumerate(found):
        if not isinstance(group.get("params"), str):
            must = "a dict whose 'params' names a part of the model"
            raise ValueError(wrong(f"{name}[{index}]", must, group, hint))
        if "lr" in group:
            positive(f"{name}[{index}]['lr']", group["lr"])
    return found


def _class_name_in_field(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
