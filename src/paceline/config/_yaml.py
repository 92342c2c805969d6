"""YAML in: strict about what people mistype, plain data out."""

import re
from pathlib import Path
from typing import Any

import yaml

from paceline.config._problems import ConfigError, Problem

_INT = re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, which reads `1e-3` as a number and refuses a key that stands twice.

    Dates and `12:30` stay text: neither has a place in JSON, and the second is base 60 in YAML 1.1.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
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
        file_name: what errors call the text.

    Raises:
        ConfigError: the text is not YAML, is empty, holds a key twice or is not a map; the
            problem's path is `file:line`.
    """
    value = _load(text, file_name)
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
    return _load(text, name)


def _load(text: str, file_name: str) -> Any:
    try:
        # The loader is a safe one: it derives from SafeLoader and adds no constructor.
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506
    except RecursionError as e:
        problem = Problem(path=file_name, value=text, message="must not nest hundreds of levels")
        raise ConfigError([problem]) from e
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError([_problem_of(e, text, file_name)]) from e


def _problem_of(error: Exception, text: str, file_name: str) -> Problem:
    reason, line = str(error), None
    if isinstance(error, yaml.MarkedYAMLError):
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else None
    elif isinstance(error, yaml.reader.ReaderError):
        reason = f"character #x{error.character:04x} is not allowed"
        line = text.count("\n", 0, error.position)
    lines = text.splitlines()
    shown = lines[line] if line is not None and line < len(lines) else text
    return Problem(
        path=file_name if line is None else f"{file_name}:{line + 1}",
        value=shown.strip(),
        message=f"must be valid YAML ({reason})",
    )
