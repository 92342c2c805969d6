"""Config objects: typed fields, hyperparameters, files of generic_trainer."""

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

from torch import nn

from paceline._base.arguments_and_errors import Check
from paceline._base.files import replacing_atomically
from paceline.declarative import _losses as _loss_classes
from paceline.declarative._objects_as_json import JsonReader, JsonWriter, ObjectFinder

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
