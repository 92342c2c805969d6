"""Free-form maps of a config: a copy that JSON can hold, or what it cannot."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from paceline.config._config_problems import Problem, join_path, refused_parts

_MAX_DEPTH = 64
_MAX_NODES = 200_000


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _JsonCopy:
    """Copies a value of a free-form map and collects what JSON cannot hold."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._num_nodes = 0

    def copy(self, value: Any, path: str, depth: int) -> Any:
        self._num_nodes += 1
        # Anchors can make a value contain itself, or double at every level.
        if depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            what = f"must have at most {_MAX_DEPTH} levels and {_MAX_NODES} values"
            raise refused_parts([Problem(path=path, value="...", message=what)])
        if isinstance(value, dict):
            return {
                key: self.copy(item, join_path(path, key), depth + 1)
                for key, item in value.items()
                if self._is_name(key, path)
            }
        if isinstance(value, list | tuple):
            return [
                self.copy(item, join_path(path, index), depth + 1)
                for index, item in enumerate(value)
            ]
        self._check_leaf(value, path)
        return value

    def _is_name(self, key: Any, path: str) -> bool:
        if isinstance(key, str) and key and _is_unicode(key):
            return True
        self.problems.append(
            Problem(
                path=path,
                value=key,
                message="must have non-empty strings as names",
                allowed="names such as `lr`",
                hint="put the name in quotes.",
            )
        )
        return False

    def _check_leaf(self, value: Any, path: str) -> None:
        if isinstance(value, float):
            is_fine, allowed = math.isfinite(value), "a finite number"
        elif isinstance(value, int):
            is_fine, allowed = -(2**63) <= value < 2**63, "an integer of 64 bits"
        elif isinstance(value, str):
            is_fine, allowed = _is_unicode(value), "text without lone surrogates"
        else:
            is_fine = value is None
            allowed = "null, true, false, a number, a string, a list or a map"
        if is_fine:
            return
        message = "must be a value that JSON can hold"
        self.problems.append(Problem(path=path, value=value, message=message, allowed=allowed))


def copy_json_map(value: dict[Any, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a deep copy of a free-form map, and a problem for each part that is not JSON."""
    copier = _JsonCopy()
    return copier.copy(value, "", 0), copier.problems


def _check_json_map(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    result, problems = copy_json_map(value)
    if problems:
        raise refused_parts(problems)
    return result


JsonMap = Annotated[dict[str, Any], BeforeValidator(_check_json_map)]
