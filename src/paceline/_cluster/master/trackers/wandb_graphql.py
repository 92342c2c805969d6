"""Answers to GraphQL of W&B's clients: selected fields, filters and orders of runs."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphql.language import (
        DirectiveNode,
        DocumentNode,
        FieldNode,
        FragmentSpreadNode,
        InlineFragmentNode,
        SelectionSetNode,
    )

    Node = FieldNode | FragmentSpreadNode | InlineFragmentNode


logger = logging.getLogger(__name__)

_MAX_CHARACTERS = 50_000
# Fragments in each other could ask for a field a thousand times over.
_MAX_SELECTIONS = 200_000
# A thousand aliases could ask for a whole history each.
_MAX_CPU_S = 10.0
_MAX_WARNED = 1000
_warned: set[tuple[str, str]] = set()


class GraphqlError(ValueError):
    """A document is none that this understands, or a request cannot be answered."""


class Document:
    """Parsed document.

    Args:
        text: Its text.
        name: Which of its operations is meant, if it has several.

    Attributes:
        kind: "query" or "mutation".

    Raises:
        GraphqlError: The text cannot be understood.
    """

    def __init__(self, text: str, name: str | None = None) -> None:
        from graphql.language import FragmentDefinitionNode, OperationDefinitionNode

        parts = _parse(text).definitions
        self._fragments = {
            part.name.value: part.selection_set
            for part in parts
            if isinstance(part, FragmentDefinitionNode)
        }
        operations = [
            part
            for part in parts
            if isinstance(part, OperationDefinitionNode)
            and name in (None, "", part.name and part.name.value)
        ]
        if len(operations) != 1:
            raise GraphqlError(f"A document must have one operation {name or ''}, but has not.")
        [self._operation] = operations
        self.kind = self._operation.operation.value
        self._variables: dict[str, Any] = {}
        self._deadline = 0.0
        self._num_left = _MAX_SELECTIONS

    def answer(self, root: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the selected fields.

        Args:
            root: Values of fields by name; a function is called with the field's arguments.
            variables: Values of the operation's variables.
        """
        from graphql import value_from_ast_untyped

        defaults = {
            one.variable.name.value: value_from_ast_untyped(one.default_value)
            for one in self._operation.variable_definitions or ()
            if one.default_value is not None
        }
        self._variables = {**defaults, **variables}
        self._deadline = time.thread_time() + _MAX_CPU_S
        return self._select(self._operation.selection_set, root, self.kind.title())

    def _select(
        self, selections: "SelectionSetNode", value: Mapping[str, Any], path: str
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in self._flat(selections, frozenset()):
            name = one.name.value
            if name not in value:
                _warn(path, name)
            item = value.get(name)
            if callable(item):
                if time.thread_time() > self._deadline:
                    raise GraphqlError(f"A request must take at most {_MAX_CPU_S:.0f} CPU seconds.")
                item = item(self._arguments(one))
            key = one.alias.value if one.alias else name
            selected = self._part(one.selection_set, item, f"{path}.{name}")
            if isinstance(found.get(key), dict) and isinstance(selected, dict):
                selected = found[key] | selected
            found[key] = selected
        return found

    def _part(self, selections: "SelectionSetNode | None", item: Any, path: str) -> Any:
        if selections is None or item is None:
            self._count(len(item) if isinstance(item, list) else 0)
            return item
        if isinstance(item, list):
            return [self._part(selections, each, path) for each in item]
        return self._select(selections, item, path)

    def _flat(
        self, selections: "SelectionSetNode", within: frozenset[str]
    ) -> "Iterator[FieldNode]":
        node: Any
        for node in selections.selections:
            self._count(1)
            if not self._is_wanted(node):
                continue
            if node.kind == "field":
                yield node
            elif node.kind == "inline_fragment":
                yield from self._flat(node.selection_set, within)
            elif (name := node.name.value) in within or name not in self._fragments:
                raise GraphqlError(f"The fragment {name!r:.50} contains itself, or is missing.")
            else:
                yield from self._flat(self._fragments[name], within | {name})

    def _count(self, number: int) -> None:
        self._num_left -= number
        if self._num_left < 0:
            raise GraphqlError(f"A request must select at most {_MAX_SELECTIONS:,} values.")

    def _is_wanted(self, node: "Node") -> bool:
        for directive in node.directives or ():
            condition = self._arguments(directive).get("if")
            name = directive.name.value
            if (name == "include" and not condition) or (name == "skip" and condition):
                return False
        return True

    def _arguments(self, node: "FieldNode | DirectiveNode") -> dict[str, Any]:
        from graphql import value_from_ast_untyped

        return {
            one.name.value: value_from_ast_untyped(one.value, self._variables)
            for one in node.arguments or ()
        }


@lru_cache(maxsize=64)
def _parse(text: str) -> "DocumentNode":
    """Return a parsed document; clients send the same few again and again."""
    # Late import: few masters are asked by these clients.
    from graphql import GraphQLSyntaxError, parse

    if len(text) > _MAX_CHARACTERS:
        raise GraphqlError(
            f"A document must have at most {_MAX_CHARACTERS:,} characters, but has {len(text):,}."
        )
    try:
        return parse(text, no_location=True)
    except (GraphQLSyntaxError, RecursionError) as error:
        raise GraphqlError(f"The document cannot be understood: {error!s:.300}") from error


def _warn(path: str, name: str) -> None:
    """Say once that a client asks for something unknown, which is answered with null."""
    if (path, name) not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add((path, name))
        logger.warning(
            "A W&B client asks for `%s` of %s, which is not known here; the answer is null.",
            name,
            path,
        )


def page(
    items: list[Any], arguments: Mapping[str, Any], show: Callable[[Any], Any], default: int = 50
) -> dict[str, Any]:
    """Return a page of a list as GraphQL's connection; a cursor is a number of items."""
    after = arguments.get("after")
    start = int(after) if isinstance(after, str) and after.isdecimal() else 0
    first = arguments.get("first")
    limit = min(first, 1000) if isinstance(first, int) and first > 0 else default
    chosen = items[start : start + limit]
    end = start + len(chosen)
    edges = [
        {"node": show(item), "cursor": str(number)} for number, item in enumerate(chosen, start + 1)
    ]
    info = {"endCursor": str(end), "hasNextPage": end < len(items), "__typename": "PageInfo"}
    return {"edges": edges, "pageInfo": info, "totalCount": len(items)}


_NAMES = {
    "display_name": "displayName",
    "created_at": "createdAt",
    "heartbeat_at": "heartbeatAt",
    "updated_at": "heartbeatAt",
    "job_type": "jobType",
    "summary": "summaryMetrics",
    "summary_metrics": "summaryMetrics",
    "description": "displayName",
    "username": "user",
}
_MAX_PATTERN = 200
_MAX_TEXT = 500
# Repeated groups and many repetitions can take for ever.
_COSTLY = re.compile(r"\)[*+?{]|\\\d")
_MAX_REPETITIONS = 3
_MISSING = object()


def matches(run: Mapping[str, Any], condition: Any) -> bool:
    """Return whether a run fulfils a filter in MongoDB's form.

    Args:
        run: Its fields; `config` and `summaryMetrics` are objects.
        condition: The filter.

    Raises:
        GraphqlError: The filter has something that is not known here.
    """
    if not isinstance(condition, dict):
        raise GraphqlError(f"A filter must be an object, but got {condition!r:.200}.")
    for name, wanted in condition.items():
        if name in ("$and", "$or", "$nor"):
            if not isinstance(wanted, list):
                raise GraphqlError(
                    f"`{name}` must have a list of filters, but got {wanted!r:.200}."
                )
            found = [matches(run, each) for each in wanted]
            is_fit = all(found) if name == "$and" else any(found) == (name == "$or")
        elif name == "$not":
            is_fit = not matches(run, wanted)
        else:
            is_fit = _fits(field_of(run, name), wanted)
        if not is_fit:
            return False
    return True


def field_of(run: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field such as `config.lr`; dots in names of metrics count too."""
    first, _, rest = name.partition(".")
    first = _NAMES.get(first, first)
    value = run.get(first, _MISSING)
    if first == "config":
        rest = rest.removesuffix(".value")
    while rest and isinstance(value, Mapping):
        if rest in value:
            return value[rest]
        part, _, rest = rest.partition(".")
        value = value.get(part, _MISSING)
    return _MISSING if rest else value


def _fits(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, dict) or not any(key.startswith("$") for key in wanted):
        return _is_equal(value, wanted)
    for name, operand in wanted.items():
        if name == "$not":
            is_fit = not _fits(value, operand)
        elif name in _OPERATORS:
            is_fit = _OPERATORS[name](value, operand)
        else:
            raise GraphqlError(
                f"A filter must have operators of {[*_OPERATORS]}, but has {name!r}."
            )
        if not is_fit:
            return False
    return True


def _is_equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, list) and not isinstance(wanted, list):
        return wanted in value
    if value is _MISSING:
        return wanted is None
    return bool(value == wanted)


def _compare(is_fit: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(value: Any, operand: Any) -> bool:
        kinds = ((int, float), str)
        is_alike = any(isinstance(value, kind) and isinstance(operand, kind) for kind in kinds)
        return is_alike and is_fit(value, operand)

    return compare


def _has_pattern(value: Any, pattern: Any) -> bool:
    text = str(pattern)
    repetitions = sum(map(text.count, "*+{"))
    if len(text) > _MAX_PATTERN or repetitions > _MAX_REPETITIONS or _COSTLY.search(text):
        raise GraphqlError(
            f"`$regex` must have at most {_MAX_PATTERN} characters, {_MAX_REPETITIONS} repetitions"
            f" and no repeated group, but got {text!r:.200}."
        )
    try:
        found = re.compile(text)
    except re.error as error:
        raise GraphqlError(f"`$regex` must be a regular expression: {error}.") from error
    values = value if isinstance(value, list) else [value]
    return any(isinstance(each, str) and found.search(each[:_MAX_TEXT]) for each in values)


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": _is_equal,
    "$ne": lambda value, operand: not _is_equal(value, operand),
    "$in": lambda value, operand: any(_is_equal(value, each) for each in operand or ()),
    "$nin": lambda value, operand: not any(_is_equal(value, each) for each in operand or ()),
    "$gt": _compare(lambda value, operand: value > operand),
    "$gte": _compare(lambda value, operand: value >= operand),
    "$lt": _compare(lambda value, operand: value < operand),
    "$lte": _compare(lambda value, operand: value <= operand),
    "$exists": lambda value, operand: (value is not _MISSING) == bool(operand),
    "$regex": _has_pattern,
}


def chosen_runs(
    runs: Sequence[Mapping[str, Any]], filters: Any, order: Any
) -> list[Mapping[str, Any]]:
    """Return the runs that fulfil a filter, in an order such as `-summary_metrics.loss`."""
    try:
        condition = json.loads(filters or "{}")
    except (TypeError, ValueError) as error:
        raise GraphqlError(f"`filters` must be JSON, but got {filters!r:.200}.") from error
    found = [run for run in runs if matches(run, condition)]
    for name in reversed(str(order or "").split(",")):
        key = name.strip().lstrip("+-")
        if key:
            found.sort(key=lambda run: _rank(field_of(run, key)), reverse=name.startswith("-"))
    return found


def _rank(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 1, float(value), ""
    return (2, 0.0, value) if isinstance(value, str) else (0, 0.0, "")
