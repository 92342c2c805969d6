"""MLflow's search language: filters of comparisons joined by AND, and orders.

The language is small and read by one pass over its words: there is nothing to nest, so that no
filter takes long.
"""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline._cluster.master.trackers.mlflow_calls import invalid

ATTRIBUTE, METRIC, PARAMETER, TAG, DATASET = "attribute", "metric", "parameter", "tag", "dataset"
_ENTITIES = {
    "attribute": ATTRIBUTE, "attributes": ATTRIBUTE, "attr": ATTRIBUTE, "run": ATTRIBUTE,
    "metric": METRIC, "metrics": METRIC,
    "parameter": PARAMETER, "parameters": PARAMETER, "param": PARAMETER, "params": PARAMETER,
    "tag": TAG, "tags": TAG,
    "dataset": DATASET, "datasets": DATASET,
}  # fmt: skip
_MAX_FILTER = 20_000
_MAX_CLAUSES = 200
_MAX_PATTERN = 1000
_WORD = re.compile(
    r"""\s*(?:
        (?P<name>(?:`[^`]*`|[A-Za-z_]\w*)(?:\.(?:`[^`]*`|"[^"]*"|'[^']*'|[\w\-/:]+))*)
        |(?P<text>'[^']*'|"[^"]*")
        |(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
        |(?P<sign>>=|<=|!=|<>|=|<|>)
        |(?P<mark>[(),])
    )\s*""",
    re.VERBOSE,
)
_NUMERIC = ("=", "!=", "<", "<=", ">", ">=")
_TEXTUAL = ("=", "!=", "LIKE", "ILIKE")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "IN": lambda value, listed: value in listed,
    "NOT IN": lambda value, listed: value not in listed,
}  # fmt: skip

Row = TypeVar("Row")
Lookup = Callable[[Row, str, str], Any]
"""Returns what a row has for an entity and a key: None for nothing, a list for several values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchableNames:
    """Entities, attributes and their types of one kind of thing."""

    numbers: frozenset[str]
    texts: frozenset[str]
    entities: frozenset[str] = frozenset({ATTRIBUTE, TAG})
    listed: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """Comparison: an entity's key against a value."""

    entity: str
    key: str
    comparator: str
    value: Any

    def fits(self, found: Any) -> bool:
        """Return whether a value fulfils it."""
        if isinstance(found, list):
            return any(self.fits(one) for one in found)
        if self.comparator in ("IS NULL", "IS NOT NULL"):
            return (found is None) == (self.comparator == "IS NULL")
        if found is None:
            return False
        if self.comparator in ("LIKE", "ILIKE"):
            return bool(self.value(found))
        return _COMPARE[self.comparator](found, self.value)


def select_rows(
    rows: Iterable[Row], text: str | None, names: SearchableNames, lookup: Lookup[Row]
) -> list[Row]:
    """Return the rows that a filter admits.

    Raises:
        MlflowError: The filter is broken.
    """
    clauses = parse_filter(text, names)
    return [
        row
        for row in rows
        if all(clause.fits(lookup(row, clause.entity, clause.key)) for clause in clauses)
    ]


def sort_rows(
    rows: Iterable[Row], orders: Sequence[str], names: SearchableNames, lookup: Lookup[Row]
) -> list[Row]:
    """Return rows in the wanted order: NaN behind all numbers, and what is missing behind all.

    Raises:
        MlflowError: An order is broken.
    """
    found = list(rows)
    for entity, key, is_descending in reversed([_parse_order(text, names) for text in orders]):
        ranks: tuple[list[tuple[Any, Row]], ...] = ([], [], [])
        for row in found:
            value = lookup(row, entity, key)
            rank = 2 if value is None else 1 if value != value else 0
            ranks[rank].append((value, row))
        ranks[0].sort(key=operator.itemgetter(0), reverse=is_descending)
        found = [row for rank in ranks for _, row in rank]
    return found


def parse_filter(text: str | None, names: SearchableNames) -> list[Clause]:
    """Return the comparisons of a filter.

    Raises:
        MlflowError: It is broken, or longer than anybody writes.
    """
    words = _Words(text or "")
    clauses: list[Clause] = []
    while not words.is_over:
        if clauses and not words.take_keyword("AND"):
            raise words.broken("expected AND")
        clauses.append(_parse_clause(words, names))
        if len(clauses) > _MAX_CLAUSES:
            raise invalid(f"A filter must have at most {_MAX_CLAUSES} comparisons.")
    return clauses


class _Words:
    """Words of a filter, one after the other."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_FILTER:
            raise invalid(
                f"A filter must have at most {_MAX_FILTER} characters, but has {len(text)}."
            )
        self._text, self._words, place = text, list[tuple[str, str]](), 0
        while place < len(text.rstrip()):
            match = _WORD.match(text, place)
            if match is None or match.lastgroup is None:
                raise invalid(f"Invalid clause(s) in filter string: {text[place:][:200]!r}")
            self._words.append((match.lastgroup, match[match.lastgroup]))
            place = match.end()
        self._words.reverse()

    @property
    def is_over(self) -> bool:
        """Whether no word is left."""
        return not self._words

    def take(self, kind: str) -> str | None:
        """Return the next word if it is of a kind."""
        return self._words.pop()[1] if self._words and self._words[-1][0] == kind else None

    def take_keyword(self, *words: str) -> bool:
        """Pass over keywords if they are next, all of them."""
        found = [text.upper() for _, text in reversed(self._words[-len(words) :])]
        if found != [*words]:
            return False
        del self._words[-len(words) :]
        return True

    def broken(self, why: str) -> Exception:
        """Return the error for what is next."""
        word = self._words[-1][1] if self._words else "the end"
        return invalid(f"Invalid clause(s) in filter string: {why}, but found {word[:200]!r}")


def _parse_clause(words: _Words, names: SearchableNames) -> Clause:
    name = words.take("name")
    if name is None:
        raise words.broken("expected 'Identifier' such as metrics.loss")
    entity, key = _identify(name, names)
    comparator = _take_comparator(words)
    is_number = entity == METRIC or (entity == ATTRIBUTE and key in names.numbers)
    allowed: tuple[str, ...] = _NUMERIC if is_number else _TEXTUAL
    if entity in (PARAMETER, TAG):
        allowed = (*allowed, "IS NULL", "IS NOT NULL")
    elif entity == DATASET or key in names.listed or (entity == ATTRIBUTE and not is_number):
        allowed = (*allowed, "IN", "NOT IN")
    if comparator not in allowed:
        raise invalid(f"Invalid comparator '{comparator}' not one of {', '.join(allowed)}")
    if comparator.startswith("IS"):
        value: Any = None
    elif comparator.endswith("IN"):
        if entity == ATTRIBUTE and key not in names.listed:
            raise invalid(
                f"Only the {sorted(names.listed)} attributes support comparison with a list of"
                " quoted string values."
            )
        value = _take_list(words)
    elif is_number:
        number = words.take("number")
        if number is None:
            raise words.broken(f"Expected numeric value type for {entity} `{key}`")
        value = float(number) if entity == METRIC or not number.isdigit() else int(number)
    else:
        value = _take_text(words, f"{entity} `{key}`")
        if comparator.endswith("LIKE"):
            value = _like(value, re.IGNORECASE if comparator == "ILIKE" else 0)
    return Clause(entity=entity, key=key, comparator=comparator, value=value)


def _take_comparator(words: _Words) -> str:
    sign = words.take("sign")
    if sign is not None:
        return "!=" if sign == "<>" else sign
    for known in (("IS", "NOT", "NULL"), ("IS", "NULL"), ("NOT", "IN"), ("IN",), ("LIKE",),
                  ("ILIKE",)):  # fmt: skip
        if words.take_keyword(*known):
            return " ".join(known)
    raise words.broken("expected comparison")


def _take_text(words: _Words, what: str) -> str:
    text = words.take("text")
    if text is None:
        raise words.broken(f"Expected a quoted string value for {what} (e.g. 'my-value')")
    return text[1:-1]


def _take_list(words: _Words) -> list[str]:
    if words.take("mark") != "(":
        raise words.broken("expected a list in parentheses")
    found: list[str] = []
    mark: str | None = ","
    while mark == ",":
        found.append(_take_text(words, "an item of the list"))
        mark = words.take("mark")
    if mark != ")":
        raise words.broken("expected a closing parenthesis")
    return found


def _identify(name: str, names: SearchableNames) -> tuple[str, str]:
    """Return the entity and the key that a name means."""
    first, dot, rest = name.partition(".")
    first = first.strip("`")
    entity, key = (_ENTITIES.get(first, ""), rest) if dot else (ATTRIBUTE, first)
    if entity not in names.entities:
        raise invalid(
            f"Invalid entity type '{first[:100]}'. Valid values are {sorted(names.entities)}"
        )
    if len(key) > 1 and key[0] == key[-1] and key[0] in "`\"'":
        key = key[1:-1]
    if entity == ATTRIBUTE:
        key = names.aliases.get(key, key)
        known = names.numbers | names.texts
        if key not in known:
            raise invalid(
                f"Invalid attribute key '{key[:100]}' specified. Valid keys are '{sorted(known)}'"
            )
    elif entity == DATASET and key not in ("name", "digest", "context"):
        raise invalid(f"Invalid dataset key '{key[:100]}' specified. Valid keys are name, digest"
                      " and context")  # fmt: skip
    return entity, key


_ORDER = re.compile(r"\s*(?P<name>.*?)(?:\s+(?P<way>asc|desc))?\s*", re.IGNORECASE | re.DOTALL)


def _parse_order(text: str, names: SearchableNames) -> tuple[str, str, bool]:
    match = _ORDER.fullmatch(text[:_MAX_PATTERN])
    name = match["name"] if match else ""
    word = _WORD.fullmatch(name)
    if match is None or word is None or word["name"] is None:
        raise invalid(f"Invalid order_by clause '{text[:200]}'. Could not be parsed.")
    return *_identify(name, names), (match["way"] or "").lower() == "desc"


def _like(pattern: str, flags: int) -> Callable[[str], bool]:
    """Return a matcher for SQL's patterns, in time linear in the text for each part."""
    if len(pattern) > _MAX_PATTERN:
        raise invalid(f"A pattern must have at most {_MAX_PATTERN} characters.")
    parts = [
        re.compile("".join("." if c == "_" else re.escape(c) for c in part), flags | re.DOTALL)
        for part in pattern.split("%")
    ]
    # All of these characters stand for one each.
    tail = len(pattern.rpartition("%")[2])

    def matches(text: str) -> bool:
        if len(parts) == 1:
            return parts[0].fullmatch(text) is not None
        first = parts[0].match(text)
        place = first.end() if first else len(text) + 1
        for part in parts[1:-1]:
            found = part.search(text, place) if place <= len(text) else None
            place = found.end() if found else len(text) + 1
        return len(text) - tail >= place and parts[-1].fullmatch(text, len(text) - tail) is not None

    return matches
