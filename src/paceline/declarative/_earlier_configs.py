"""Config files of generic_trainer, whose text it evaluates, as plain data of this package."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.declarative import _loss_classes

logger = logging.getLogger(__name__)

_CLASS = re.compile(r"<class '([\w.]+)'>")
_CALL = re.compile(r"([A-Za-z_]\w*)\(.*\)", re.DOTALL)
_OBJECT = re.compile(r"<.* at 0x[0-9a-f]+>", re.DOTALL)
_CONFIG_CLASS, _LEFT_OUT = "config_class", "left_out"


def is_earlier(data: Any) -> bool:
    """Tell whether a config is one that generic_trainer has written."""
    if not isinstance(data, Mapping):
        return False
    inner = [value for value in data.values() if isinstance(value, Mapping)]
    names = [value[_CONFIG_CLASS] for value in inner if _CONFIG_CLASS in value]
    texts = [value for value in data.values() if isinstance(value, str)]
    has_plain_names = any("." not in str(name) for name in names)
    return has_plain_names or any(_CLASS.fullmatch(t) or _OBJECT.fullmatch(t) for t in texts)


def taken_over(data: Mapping[str, Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of generic_trainer as this package writes it.

    Args:
        data: What generic_trainer has written.
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
