"""The hyperparameter space: parsing, random samples, grid points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from paceline.search._hyperparameter_kinds import (
    Categorical,
    Const,
    DoubleRange,
    IntRange,
    Leaf,
    LogRange,
    SpaceError,
)
from paceline.search._random_stream import Rng

_KINDS: dict[str, Callable[[str, dict[str, Any]], Leaf]] = {
    "categorical": Categorical.parse,
    "const": Const.parse,
    "double": DoubleRange.parse,
    "int": IntRange.parse,
    "log": LogRange.parse,
}


class Space:
    """Hold a parsed hyperparameter space, whose names are sorted at every level."""

    __slots__ = ("_leaves", "_root")

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._leaves = tuple(_walk(root))

    def sample(self, rng: Rng) -> dict[str, Any]:
        """Draw a value for each hyperparameter, in sorted order."""
        return _build(self._root, lambda leaf: leaf.sample(rng))

    def grid_size(self) -> int:
        """Return how many points the grid has.

        Raises:
            SpaceError: If a range has no `count`.
        """
        return math.prod(leaf.num_points() for leaf in self._leaves)

    def grid_point(self, index: int) -> dict[str, Any]:
        """Return one grid point without making the others; the last name varies fastest.

        Raises:
            SpaceError: If a range has no `count`.
            IndexError: If the grid has no such point.
        """
        if not 0 <= index < self.grid_size():
            raise IndexError(f"`index` must be from 0 to {self.grid_size() - 1}, but got {index}.")
        digits = []
        for leaf in reversed(self._leaves):
            index, digit = divmod(index, leaf.num_points())
            digits.append(digit)
        # `_build` meets the leaves in the order in which `_walk` did.
        return _build(self._root, lambda leaf: leaf.point(digits.pop()))

    def grid(self) -> list[dict[str, Any]]:
        """Return all points of the grid; the last name varies fastest.

        Raises:
            SpaceError: If a range has no `count`.
        """
        return [self.grid_point(index) for index in range(self.grid_size())]


def parse_space(hyperparameters: dict[str, Any]) -> Space:
    """Parse the `hyperparameters` section of a configuration.

    A map with a `type` is one hyperparameter, a map without is a group of them, and anything
    else is a constant.

    Raises:
        SpaceError: If something is wrong; it names the dotted path, the value and what is allowed.
    """
    if not isinstance(hyperparameters, dict):
        raise SpaceError(
            "",
            f"`hyperparameters` must be a map of names to values, but got {hyperparameters!r}.",
            "write for example `hyperparameters: {lr: 0.1}`.",
        )
    return Space(_parse_group("", hyperparameters))


def _parse_group(path: str, group: dict[Any, Any]) -> dict[str, Any]:
    for name in group:
        if not isinstance(name, str) or not name:
            raise SpaceError(
                path,
                f"The names in `{path or 'hyperparameters'}` must be non-empty strings, "
                f"but got {name!r}.",
                "put the name in quotes.",
            )
    return {
        name: _parse_node(f"{path}.{name}" if path else name, group[name]) for name in sorted(group)
    }


def _parse_node(path: str, node: Any) -> Leaf | dict[str, Any]:
    if not isinstance(node, dict):
        return Const.of(path, node)
    if "type" not in node:
        return _parse_group(path, node)
    kind = node["type"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SpaceError(
            path,
            f"`{path}.type` must be one of {', '.join(f'`{kind}`' for kind in _KINDS)}, "
            f"but got {kind!r}.",
            "the key `type` says what kind of hyperparameter this is; "
            "a hyperparameter inside a group needs another name than `type`.",
        )
    return _KINDS[kind](path, {key: deepcopy(node[key]) for key in node if key != "type"})


def _walk(group: dict[str, Any]) -> Iterator[Leaf]:
    for node in group.values():
        if isinstance(node, dict):
            yield from _walk(node)
        else:
            yield node


def _build(group: dict[str, Any], choose: Callable[[Leaf], Any]) -> dict[str, Any]:
    return {
        name: _build(node, choose) if isinstance(node, dict) else choose(node)
        for name, node in group.items()
    }
