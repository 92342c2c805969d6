"""Values of config fields: their checks, and objects as plain data for JSON and YAML."""

import dataclasses
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch

from paceline._base.arguments_and_errors import Check, number, one_of, positive, text, wrong
from paceline._training.engine.fsdp_and_tensor_parallel import check_plan

logger = logging.getLogger(__name__)


# JSON keys that mark an object, a class, a function or a tensor.
_OBJECT, _CLASS, _FUNCTION, _TENSOR = "object", "class", "function", "tensor"
_CONFIG_CLASS, _LEFT_OUT = "config_class", "left_out"
_SAFE_BASES = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset)
# Torch's losses take these for the sake of old code and keep neither; `reduction` says the same.
_FORGOTTEN_ARGUMENTS = ("size_average", "reduce")


class _NotWritableError(ValueError):
    """Raised for a value without a form as plain data."""


class JsonWriter:
    """Turn config objects into plain data."""

    def fields_of(self, container: Any) -> dict[str, Any]:
        """Return a config object's fields, with its class and the omitted fields."""
        data: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        try:
            data[_CONFIG_CLASS] = _path_of(type(container))
        except _NotWritableError as error:
            logger.debug("The class of a config object is left out: %s.", error)
        for field in dataclasses.fields(container):
            try:
                data[field.name] = self._plain(getattr(container, field.name))
            except _NotWritableError as error:
                left_out[field.name] = str(error)
        return {**data, _LEFT_OUT: left_out} if left_out else data

    def _plain(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [self._plain(item) for item in value]
        if isinstance(value, Mapping):
            return {str(key): self._plain(item) for key, item in value.items()}
        if isinstance(value, type):
            return {_CLASS: _path_of(value)}
        if dataclasses.is_dataclass(value):
            return self.fields_of(value)
        if isinstance(value, torch.Tensor):
            return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, FunctionType):
            return {_FUNCTION: _path_of(value)}
        if isinstance(value, torch.nn.Module):
            return {_OBJECT: _path_of(type(value)), "arguments": self._arguments_of(value)}
        raise _NotWritableError(f"an object of {type(value).__name__}")

    def _arguments_of(self, module: torch.nn.Module) -> dict[str, Any]:
        kind = type(module)
        arguments = {}
        for name, parameter in inspect.signature(kind).parameters.items():
            if name in _FORGOTTEN_ARGUMENTS and kind.__module__.startswith("torch."):
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise _NotWritableError(f"{kind.__name__} takes any arguments")
            if not hasattr(module, name):
                raise _NotWritableError(f"{kind.__name__} keeps no attribute `{name}`")
            arguments[name] = self._plain(getattr(module, name))
        return arguments


def _path_of(value: Any) -> str:
    """Return the import path of a class or function."""
    module, name = value.__module__, value.__qualname__
    if module.startswith("paceline."):
        # Private modules may move, and files stay readable.
        module, _, _ = module.partition("._")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise _NotWritableError(f"{name} cannot be imported from {module}")
    return f"{module}:{name}" if "." in name else f"{module}.{name}"


class ObjectFinder:
    """Find classes and functions by their import path, in allowed places only.

    Args:
        namespace: Where they are looked for first.
        allowed: Packages and modules of the user's that may be imported.
        own: The package of the config classes, whose classes are allowed.
        hint: How to allow a module, with `{module}` in its place.

    Attributes:
        namespace: Where they are looked for first.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        allowed: tuple[str, ...],
        own: str,
        hint: str = "allowed_modules=['{module}'] if you trust it, or namespace=globals() if it is"
        " imported there.",
    ) -> None:
        self.namespace = namespace
        self._allowed = allowed
        self._own = own
        self._hint = hint

    def find(self, path: Any, field: str) -> Any:
        """Return the object at an import path.

        Raises:
            ValueError: It is no path, its module is not allowed, or there is no such name.
        """
        module, _, name = str(path).partition(":") if ":" in str(path) else _split(str(path))
        if not isinstance(path, str) or not module or not name:
            raise ValueError(f"`{field}` must name a module and a name in it, but got {path!r}.")
        for value in self.namespace.values():
            # `__main__` matches any module: the script's class may be imported in this process.
            is_there = module in (getattr(value, "__module__", ""), "__main__")
            if is_there and getattr(value, "__qualname__", "") == name:
                return value
        self._check_module(module, path, field)
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Modules missing inside the named module raise with their own traceback.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ValueError(
                f"`{field}` names {path!r}, but there is no module {error.name!r}."
            ) from error
        for part in name.split("."):
            if not hasattr(found, part):
                hint = " Hint: name the module of the script that it was in."
                raise ValueError(
                    f"`{field}` names {path!r}, but {module} has no {name!r}."
                    f"{hint if module == '__main__' else ''}"
                )
            found = getattr(found, part)
        self._check_safe(found, path, field)
        return found

    def is_users(self, module: str) -> bool:
        """Return whether a module belongs to the user: allowed by name, or the main script."""
        return module == "__main__" or any(
            module == allowed or module.startswith(f"{allowed}.") for allowed in self._allowed
        )

    def _check_module(self, module: str, path: str, field: str) -> None:
        if (
            not self.is_users(module)
            and module.partition(".")[0] != "torch"
            and not f"{module}.".startswith(f"{self._own}.")
        ):
            raise ValueError(
                f"`{field}` must come from an allowed module, but names {path!r}. Hint:"
                f" {self._hint.format(module=module.partition('.')[0])}"
            )

    def _check_safe(self, found: Any, path: str, field: str) -> None:
        """Refuse objects unrelated to training, in packages with other uses."""
        module = str(getattr(found, "__module__", ""))
        if self.is_users(module) or self.is_users(path.partition(":")[0].rpartition(".")[0]):
            return
        is_safe_class = isinstance(found, type) and (
            issubclass(found, _SAFE_BASES) or module.startswith(("torch.optim", self._own))
        )
        is_function = callable(found) and module.startswith(("torch.nn", "torch._C._nn"))
        if not is_safe_class and not is_function:
            raise ValueError(f"`{field}` must not name {path!r}, which is not for training.")


def _split(path: str) -> tuple[str, str, str]:
    module, dot, name = path.rpartition(".")
    return module, dot, name


class JsonReader:
    """Make values of plain data.

    Args:
        finder: Finds classes and functions.
        class_fields: Fields that may name a class by its import path alone.
        other_names: Fields by other spellings of their names.
    """

    def __init__(
        self, finder: ObjectFinder, class_fields: Collection[str], other_names: Mapping[str, str]
    ) -> None:
        self._finder = finder
        self._class_fields = class_fields
        self._other_names = other_names

    def fields(self, container: Any, data: Any) -> dict[str, Any]:
        """Return the field values contained in plain data.

        Args:
            container: The config object that they are for.
            data: The data that `JsonWriter` wrote, or a file's content.

        Raises:
            ValueError: Something cannot be found, or may not be.
            TypeError: `data` is no mapping.
        """
        if not isinstance(data, Mapping):
            raise TypeError(
                f"The options of {type(container).__name__} must be a map, but got {data!r}."
            )
        for name, reason in (data.get(_LEFT_OUT) or {}).items():
            # Data sets never are, and a script that lacks one gets an error.
            level = logging.INFO if name.endswith("dataset") else logging.WARNING
            text = "`%s` was not written (%s), and has its default unless the script sets it."
            logger.log(level, text, name, reason)
        found: dict[str, Any] = {}
        for given, value in data.items():
            name = self._other_names.get(given, str(given))
            if name not in (_CONFIG_CLASS, _LEFT_OUT):
                found[name] = self._value(name, value, getattr(container, name, None))
        return found

    def _value(self, name: str, value: Any, current: Any) -> Any:
        if name in self._class_fields and isinstance(value, str):
            return self._finder.find(value, name)
        if isinstance(value, list):
            items = [self._value(f"{name}[{i}]", item, None) for i, item in enumerate(value)]
            return tuple(items) if isinstance(current, tuple) else items
        if not isinstance(value, Mapping):
            return value
        if value.keys() in ({_CLASS}, {_FUNCTION}):
            return self._finder.find(next(iter(value.values())), name)
        if value.keys() in ({_OBJECT}, {_OBJECT, "arguments"}):
            return self._object(name, value)
        if value.keys() == {_TENSOR, "dtype"}:
            return torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
        if dataclasses.is_dataclass(current):
            return self._container(name, value, current)
        return {key: self._value(f"{name}.{key}", item, None) for key, item in value.items()}

    def _object(self, name: str, value: Mapping[str, Any]) -> Any:
        kind = self._finder.find(value[_OBJECT], name)
        if not callable(kind):
            raise ValueError(f"`{name}` must name a class, but got {value[_OBJECT]!r}.")
        given = self._value(f"{name}.arguments", value.get("arguments") or {}, None)
        try:
            inspect.signature(kind).bind(**given)
        except TypeError as error:
            raise ValueError(
                f"`{name}` must have arguments that {value[_OBJECT]} takes, but got"
                f" {dict(given)!r}: {error}."
            ) from error
        return kind(**given)

    def _container(self, name: str, value: Mapping[str, Any], current: Any) -> Any:
        kind = type(current)
        if _CONFIG_CLASS in value:
            kind = self._finder.find(value[_CONFIG_CLASS], f"{name}.{_CONFIG_CLASS}")
            if not dataclasses.is_dataclass(kind):
                raise ValueError(f"`{name}.{_CONFIG_CLASS}` must name a config class: {kind!r}.")
        start = current if type(current) is kind else _blank(kind)
        found = self.fields(start, value)
        known = {field.name for field in dataclasses.fields(kind)}
        if not known and hasattr(kind, "of"):
            # Parameters that a file names need no class of the user's.
            return kind.of(found)
        if unknown := sorted(found.keys() - known):
            raise ValueError(f"`{name}` has no field {unknown[0]!r}, only {sorted(known)}.")
        if start is current:
            return dataclasses.replace(current, **found)
        return kind(**found)


def _blank(kind: Any) -> Any:
    """Return an object to take the types of fields from; None if some field has no default."""
    try:
        return kind()
    except TypeError:
        return None


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
