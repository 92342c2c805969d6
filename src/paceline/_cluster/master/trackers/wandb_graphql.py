"""The part of GraphQL that W&B's clients speak: parsing, and selecting fields of an answer."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

_TOKEN = re.compile(
    r'[\s,\ufeff]+|\#[^\r\n]*|(?P<block>"""(?:[^"]|"(?!""))*""")'
    r'|(?P<string>"(?:[^"\\\r\n]|\\.)*")|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)'
    r"|(?P<name>[_A-Za-z]\w*)|(?P<mark>\.\.\.|[!$&()\[\]{}:=|@])",
    re.ASCII,
)
_MAX_DEPTH = 32
# Fragments in each other could ask for a field a thousand times over.
_MAX_SELECTIONS = 200_000
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_WARNED = 1000
_warned: set[tuple[str, str]] = set()


class GraphqlError(ValueError):
    """A document is none that this understands, or a request cannot be answered."""


@dataclass(slots=True)
class Selection:
    """Field with its arguments and its own selections, or a fragment of these."""

    name: str
    alias: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    directives: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    selections: "list[Selection]" = field(default_factory=list)
    is_fragment: bool = False


@dataclass(slots=True)
class Operation:
    """Query or mutation of a document; `defaults` are those of its variables."""

    kind: str
    name: str
    defaults: dict[str, Any]
    selections: list[Selection]


class _Variable(str):
    """Name of a variable in the place of a value."""

    __slots__ = ()


class _Parser:
    """Recursive descent over the tokens of a document."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), ("end", "")]
        self._place = 0
        self._depth = 0
        self.operations: list[Operation] = []
        self.fragments: dict[str, list[Selection]] = {}

    def parse(self) -> None:
        """Read all operations and fragments."""
        while self._kind() != "end":
            if self._text() == "{":
                self.operations.append(Operation("query", "", {}, self._selections()))
                continue
            word = self._take("name")
            if word == "fragment":
                name = self._take("name")
                self._take("name")
                self._take("name")
                self._directives()
                self.fragments[name] = self._selections()
            elif word in ("query", "mutation"):
                name = self._take("name") if self._kind() == "name" else ""
                defaults = self._variable_definitions()
                self._directives()
                self.operations.append(Operation(word, name, defaults, self._selections()))
            else:
                raise GraphqlError(f"A document must have queries or mutations, but has {word!r}.")

    def _kind(self) -> str:
        return self._tokens[self._place][0]

    def _text(self) -> str:
        return self._tokens[self._place][1]

    def _take(self, kind: str, text: str | None = None) -> str:
        found_kind, found = self._tokens[self._place]
        if found_kind != kind or text not in (None, found):
            raise GraphqlError(f"Expected {text or kind} in the document, but got {found!r:.50}.")
        self._place += 1
        return found

    def _skip(self, text: str) -> bool:
        if self._text() != text or self._kind() != "mark":
            return False
        self._place += 1
        return True

    def _variable_definitions(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {}
        if self._skip("("):
            while not self._skip(")"):
                self._take("mark", "$")
                name = self._take("name")
                self._take("mark", ":")
                while self._kind() == "name" or self._text() in ("[", "]", "!"):
                    self._place += 1
                if self._skip("="):
                    defaults[name] = self._value()
                self._directives()
        return defaults

    def _selections(self) -> list[Selection]:
        self._take("mark", "{")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GraphqlError(f"A document must be nested at most {_MAX_DEPTH} times.")
        found = []
        while not self._skip("}"):
            found.append(self._fragment() if self._skip("...") else self._field())
        self._depth -= 1
        return found

    def _fragment(self) -> Selection:
        if self._kind() == "name" and self._text() != "on":
            name = self._take("name")
            return Selection(name, directives=self._directives(), is_fragment=True)
        if self._kind() == "name":
            self._place += 1
            self._take("name")
        directives = self._directives()
        return Selection("", directives=directives, selections=self._selections(), is_fragment=True)

    def _field(self) -> Selection:
        alias = name = self._take("name")
        if self._skip(":"):
            name = self._take("name")
        arguments, directives = self._arguments(), self._directives()
        selections = self._selections() if self._text() == "{" else []
        return Selection(name, alias, arguments, directives, selections)

    def _arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._skip("("):
            while not self._skip(")"):
                name = self._take("name")
                self._take("mark", ":")
                found[name] = self._value()
        return found

    def _directives(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        while self._skip("@"):
            name = self._take("name")
            found.append((name, self._arguments()))
        return found

    def _value(self) -> Any:
        kind, text = self._tokens[self._place]
        self._depth += 1
        if self._depth > _MAX_DEPTH or kind == "end":
            raise GraphqlError("A value of the document has no end, or is nested too deeply.")
        self._place += 1
        value: Any
        if text == "$":
            value = _Variable(self._take("name"))
        elif text == "[":
            value = []
            while not self._skip("]"):
                value.append(self._value())
        elif text == "{":
            value = {}
            while not self._skip("}"):
                name = self._take("name")
                self._take("mark", ":")
                value[name] = self._value()
        elif kind == "name":
            value = _CONSTANTS.get(text, text)
        elif kind == "block":
            value = text[3:-3]
        elif kind in ("string", "number"):
            value = json.loads(text)
        else:
            raise GraphqlError(f"Expected a value in the document, but got {text!r:.50}.")
        self._depth -= 1
        return value


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise GraphqlError(f"The document has no meaning from {text[place : place + 20]!r} on.")
        place = found.end()
        if found.lastgroup is not None:
            yield found.lastgroup, found.group()


class Document:
    """Parsed document.

    Args:
        text: Its text.
        name: Which of its operations is meant, if it has several.

    Raises:
        GraphqlError: The text cannot be understood.
    """

    def __init__(self, text: str, name: str | None = None) -> None:
        parser = _Parser(text)
        parser.parse()
        operations = [one for one in parser.operations if name in (None, "", one.name)]
        if len(operations) != 1:
            raise GraphqlError(f"A document must have one operation {name or ''}, but has not.")
        self.operation = operations[0]
        self._fragments = parser.fragments
        self._num_left = _MAX_SELECTIONS

    def answer(self, root: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the selected fields.

        Args:
            root: Values of fields by name; a function is called with the field's arguments.
            variables: Values of the operation's variables.
        """
        values = {**self.operation.defaults, **variables}
        kind = self.operation.kind.title()
        return self._select(self.operation.selections, root, values, kind)

    def _select(
        self,
        selections: list[Selection],
        value: Mapping[str, Any],
        variables: Mapping[str, Any],
        path: str,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in self._flat(selections, variables, frozenset()):
            if one.name not in value:
                _warn(path, one.name)
            item = value.get(one.name)
            if callable(item):
                item = item(_filled(one.arguments, variables))
            key = one.alias or one.name
            selected = self._part(one, item, variables, f"{path}.{one.name}")
            if isinstance(found.get(key), dict) and isinstance(selected, dict):
                selected = found[key] | selected
            found[key] = selected
        return found

    def _part(self, one: Selection, item: Any, variables: Mapping[str, Any], path: str) -> Any:
        if not one.selections or item is None:
            return item
        if isinstance(item, list):
            return [self._part(one, each, variables, path) for each in item]
        return self._select(one.selections, item, variables, path)

    def _flat(
        self, selections: list[Selection], variables: Mapping[str, Any], within: frozenset[str]
    ) -> Iterator[Selection]:
        for one in selections:
            self._num_left -= 1
            if self._num_left < 0:
                raise GraphqlError(f"A request must select at most {_MAX_SELECTIONS:,} fields.")
            if not _is_wanted(one, variables):
                continue
            if not one.is_fragment:
                yield one
            elif not one.name:
                yield from self._flat(one.selections, variables, within)
            elif one.name in within or one.name not in self._fragments:
                raise GraphqlError(f"The fragment {one.name!r:.50} contains itself, or is missing.")
            else:
                inner = self._fragments[one.name]
                yield from self._flat(inner, variables, within | {one.name})


def _is_wanted(one: Selection, variables: Mapping[str, Any]) -> bool:
    for name, arguments in one.directives:
        condition = _filled(arguments, variables).get("if")
        if (name == "include" and not condition) or (name == "skip" and condition):
            return False
    return True


def _filled(value: Any, variables: Mapping[str, Any]) -> Any:
    if isinstance(value, _Variable):
        return variables.get(value)
    if isinstance(value, dict):
        return {name: _filled(item, variables) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables) for item in value]
    return value


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
