"""YAML in: strict reading with limits, and single fields set by `--config a.b=value`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paceline.config._fields_and_problems import ConfigError, Problem

_INT = re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)

# Far beyond any config, and read within seconds.
_MAX_VALUES = 200_000
_MAX_CHARACTERS = 10_000_000
_MAX_LEVELS = 100


class _LimitError(yaml.MarkedYAMLError):
    """Raised when a text is YAML, but too large or too deep with all aliases expanded."""


class _Size(NamedTuple):
    """Size of a part of a document with all aliases expanded, and its nesting depth."""

    values: int
    characters: int
    levels: int


class _LimitedLoader(yaml.SafeLoader):
    """Safe loader with limits: documents too large or too deep are refused.

    An alias counts as its expansion: a few lines of aliases of aliases can stand for more
    values than any memory holds. Nothing is expanded to count it.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_values = self._num_characters = 0
        # Level of the node being read, and of the deepest node below so far.
        self._level = self._deepest = 0
        self._anchored: dict[str, _Size] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._count_alias(event)
            return super().compose_node(parent, index)
        values, characters, deepest = self._num_values, self._num_characters, self._deepest
        self._level += 1
        length = len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
        self._count(_Size(1, length, 1), event.start_mark)
        self._deepest = self._level
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._anchored[event.anchor] = _Size(
                self._num_values - values,
                self._num_characters - characters,
                self._deepest - self._level + 1,
            )
        self._level -= 1
        self._deepest = max(self._deepest, deepest)
        return node

    def _count_alias(self, event: Any) -> None:
        if event.anchor in self._anchored:
            self._level += 1
            self._count(self._anchored[event.anchor], event.start_mark)
            self._level -= 1
        elif event.anchor in self.anchors:
            raise _LimitError(problem="must not hold itself", problem_mark=event.start_mark)

    def _count(self, size: _Size, mark: Any) -> None:
        self._num_values += size.values
        self._num_characters += size.characters
        self._deepest = max(self._deepest, self._level + size.levels - 1)
        if self._num_values > _MAX_VALUES:
            limit = f"must hold at most {_MAX_VALUES:,} values with its aliases expanded"
        elif self._num_characters > _MAX_CHARACTERS:
            limit = f"must hold at most {_MAX_CHARACTERS:,} characters with its aliases expanded"
        elif self._deepest > _MAX_LEVELS:
            limit = f"must nest at most {_MAX_LEVELS} levels deep with its aliases expanded"
        else:
            return
        raise _LimitError(problem=limit, problem_mark=mark)


class _StrictLoader(_LimitedLoader):
    """Limited loader: reads `1e-3` as a number and refuses duplicate keys.

    Dates and `12:30` stay text: neither has a place in JSON, and the second is base 60 in YAML 1.1.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # yaml itself silently keeps the last of two equal keys.
        seen: dict[tuple[str, str], int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                continue
            key = (key_node.tag, key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key `{key_node.value}` stands twice, first in line {seen[key]}",
                    key_node.start_mark,
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


def _replace_resolvers() -> None:
    replaced = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
    _StrictLoader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    numbers = list("-+.0123456789")
    _StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, numbers)
    _StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, numbers)


_replace_resolvers()


def parse_yaml(text: str, *, file_name: str = "<text>") -> dict[str, Any]:
    """Parse the YAML text of a config into a map.

    Args:
        text: one YAML document.
        file_name: the name of the text in errors.

    Raises:
        ConfigError: the text is not YAML, is empty, holds a key twice, is not a map, or is too
            large or too deep with all aliases expanded; the problem's path is `file:line`.
    """
    value = _load_yaml(text, file_name)
    if value is None:
        raise ConfigError(
            [Problem(path=file_name, value=text, message="must not be empty", allowed="a YAML map")]
        )
    if not isinstance(value, dict):
        raise ConfigError(
            [
                Problem(
                    path=file_name,
                    value=value,
                    message="must hold a map of fields",
                    allowed="lines such as `name: my-experiment`",
                )
            ]
        )
    return value


def compose_yaml(text: str) -> yaml.Node | None:
    """Return a YAML text as nodes with line numbers; None if the text is empty.

    Raises:
        ConfigError: the text is not YAML, or is too large or too deep with all aliases expanded.
    """
    with _yaml_problems_of(text, "<text>"):
        return yaml.compose(text, Loader=_StrictLoader)


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Read and parse a config file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 text, or `parse_yaml` refuses it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        reason = e.strerror or str(e)
        problem = Problem(path=str(path), value=reason, message="must be a file that can be read")
        raise ConfigError([problem]) from e
    except UnicodeDecodeError as e:
        problem = Problem(path=str(path), value=e.reason, message="must be UTF-8 text")
        raise ConfigError([problem]) from e
    return parse_yaml(text, file_name=str(path))


def parse_scalar(text: str, *, name: str) -> Any:
    """Parse the YAML value of an override.

    Raises:
        ConfigError: the text is not YAML.
    """
    return _load_yaml(text, name)


def _load_yaml(text: str, file_name: str) -> Any:
    with _yaml_problems_of(text, file_name):
        # The loader is a safe one: it derives from SafeLoader and adds no constructor.
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506


@contextmanager
def _yaml_problems_of(text: str, file_name: str) -> Iterator[None]:
    """Raise the problems of a text as a `ConfigError`."""
    try:
        yield
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError([_yaml_problem_of(e, text, file_name)]) from e


def _yaml_problem_of(error: Exception, text: str, file_name: str) -> Problem:
    reason, line = str(error), None
    lines = text.splitlines()
    if isinstance(error, yaml.MarkedYAMLError):
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        marks = [mark.line for mark in (error.problem_mark, error.context_mark) if mark]
        # Behind the last line the text lacks the end of what the context began.
        within = [line for line in marks if line < len(lines)]
        line = next(iter(within or marks), None)
    elif isinstance(error, yaml.reader.ReaderError):
        reason = f"character #x{error.character:04x} is not allowed"
        line = text.count("\n", 0, error.position)
    shown = lines[line] if line is not None and line < len(lines) else text
    is_beyond = isinstance(error, _LimitError)
    return Problem(
        path=file_name if line is None else f"{file_name}:{line + 1}",
        value=shown.strip(),
        message=reason if is_beyond else f"must be valid YAML ({reason})",
        hint="an alias such as `*name` counts as all that it stands for." if is_beyond else "",
    )


# A single value for one of these fields is a list of one.
_LIST_FIELDS = frozenset({("labels",), ("searcher", "bracket_rungs")})


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with each override `a.b=value` set.

    A value that starts with `[`, `{` or a quote is YAML, one with a comma is a list of YAML
    scalars, and any other is one YAML scalar. Maps on the way are made when they are missing.

    Raises:
        ConfigError: an override has no `=`, an empty name, a value that is not YAML, or leads
            through a field that is not a map.
    """
    result = dict(data)
    problems: list[Problem] = []
    for override in overrides:
        try:
            _apply_override(result, override)
        except ConfigError as e:
            problems.extend(e.problems)
    if problems:
        raise ConfigError(problems)
    return result


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    names = tuple(dotted.strip().split("."))
    if not equals or not all(names):
        raise ConfigError(
            [
                Problem(
                    path="--config",
                    value=override,
                    message="must name a field and its value",
                    allowed="FIELD=VALUE, for example `searcher.max_trials=16`",
                )
            ]
        )
    value = _parse_value(text.strip(), f"--config {dotted}")
    if names in _LIST_FIELDS and value is not None and not isinstance(value, list):
        value = [value]
    *parents, last = names
    target = data
    for depth, name in enumerate(parents):
        child = target.get(name, {})
        child = {} if child is None else child
        if not isinstance(child, dict):
            path = ".".join(parents[: depth + 1])
            message = f"must be a map for `--config {override}` to apply"
            raise ConfigError([Problem(path=path, value=child, message=message)])
        # The caller's own map stays as it is.
        copied = dict(child)
        target[name] = copied
        target = copied
    target[last] = value


def _parse_value(text: str, name: str) -> Any:
    if not text.startswith(("[", "{", '"', "'")) and "," in text:
        return [parse_scalar(part.strip(), name=name) for part in text.split(",")]
    return parse_scalar(text, name=name)
