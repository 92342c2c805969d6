"""Hyperparameter space: parsing, samples, grid points, checks of proposals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from paceline._base.arguments_and_errors import Rng
from paceline.search._hyperparameter_kinds import (
    Categorical,
    Const,
    DoubleRange,
    IntRange,
    Leaf,
    LogRange,
    Parameter,
    SpaceError,
)

if TYPE_CHECKING:
    pass


_KINDS: dict[str, Callable[[str, dict[str, Any]], Leaf]] = {
    "categorical": Categorical.parse,
    "const": Const.parse,
    "double": DoubleRange.parse,
    "int": IntRange.parse,
    "log": LogRange.parse,
}


class Space:
    """Parsed hyperparameter space with names sorted at every level."""

    __slots__ = ("_leaves", "_root", "parameters")

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._leaves = tuple(_walk(root))
        self.parameters: tuple[Parameter, ...] = tuple(
            leaf.described(path) for path, leaf in self._leaves if not isinstance(leaf, Const)
        )
        """The hyperparameters that vary, without groups, in sorted order."""

    def sample(self, rng: Rng) -> dict[str, Any]:
        """Draw a value for each hyperparameter, in sorted order."""
        return _build(self._root, lambda leaf: leaf.sample(rng))

    def grid_size(self) -> int:
        """Return how many points the grid has.

        Raises:
            SpaceError: If a range has no `count`.
        """
        return math.prod(leaf.num_points() for _, leaf in self._leaves)

    def grid_point(self, index: int) -> dict[str, Any]:
        """Return a grid point without making the others; the last name varies fastest.

        Raises:
            SpaceError: If a range has no `count`.
            IndexError: If the grid has no such point.
        """
        if not 0 <= index < self.grid_size():
            raise IndexError(f"`index` must be from 0 to {self.grid_size() - 1}, but got {index}.")
        digits = []
        for _, leaf in reversed(self._leaves):
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

    def encode(self, hparams: dict[str, Any]) -> list[float]:
        """Return checked hyperparameters as numbers from 0 to 1, in the order of `parameters`.

        A choice and an integer become the middle of a part of the same size for each.
        """
        leaves = (leaf for _, leaf in self._leaves if not isinstance(leaf, Const))
        return [
            leaf.share(each.of(hparams)) for each, leaf in zip(self.parameters, leaves, strict=True)
        ]

    def decode(self, shares: Sequence[float]) -> dict[str, Any]:
        """Return the hyperparameters for numbers from 0 to 1, in the order of `parameters`.

        Raises:
            ValueError: If there is another number of them, or one is outside.
        """
        if len(shares) != len(self.parameters) or not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                f"`shares` must be {len(self.parameters)} numbers from 0 to 1, but got"
                f" {list(shares)}.\nHint: one for each of `space.parameters`."
            )
        rest = iter(shares)
        return _build(
            self._root, lambda leaf: leaf.at(0.0 if isinstance(leaf, Const) else next(rest))
        )

    def build(self, values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
        """Return the hyperparameters for values by `path`; constants are added."""
        return self.check(_nested(values))

    def check(self, hparams: Any) -> dict[str, Any]:
        """Return hyperparameters with their constants, and numbers of a real range as floats.

        Raises:
            SpaceError: If a name is missing or unknown, or a value is outside.
        """
        return _checked("", self._root, hparams)


def parse_space(hyperparameters: dict[str, Any]) -> Space:
    """Parse the `hyperparameters` section of a configuration.

    A map with a `type` is one hyperparameter, a map without is a group of them, and anything
    else is a constant.

    Raises:
        SpaceError: If a value is not valid; the text has its dotted path and the allowed values.
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


def _walk(
    group: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    for name, node in group.items():
        if isinstance(node, dict):
            yield from _walk(node, (*path, name))
        else:
            yield (*path, name), node


def _nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in values.items():
        group = root
        for name in path[:-1]:
            group = group.setdefault(name, {})
        group[path[-1]] = value
    return root


def _checked(path: str, group: dict[str, Any], given: Any) -> dict[str, Any]:
    names = f"the names {', '.join(group)}" if group else "no names"
    if not isinstance(given, dict) or given.keys() - group.keys():
        raise SpaceError(
            path,
            f"`{path or 'hparams'}` must be a map with {names}, but got {given!r:.200}.",
            "give exactly the hyperparameters of the space.",
        )
    found = {}
    for name, node in group.items():
        below = f"{path}.{name}" if path else name
        if isinstance(node, dict):
            found[name] = _checked(below, node, given.get(name, {}))
            continue
        try:
            if name in given:
                value = given[name]
                # Libraries return numbers of NumPy.
                found[name] = node.taken(value.item() if hasattr(value, "item") else value)
            elif isinstance(node, Const):
                found[name] = node.at(0.0)
            else:
                raise ValueError("must be given, but it is missing")
        except ValueError as error:
            hint = "take the bounds from `space.parameters`."
            raise SpaceError(below, f"`{below}` {error}.", hint) from None
    return found


def _build(group: dict[str, Any], choose: Callable[[Leaf], Any]) -> dict[str, Any]:
    return {
        name: _build(node, choose) if isinstance(node, dict) else choose(node)
        for name, node in group.items()
    }
