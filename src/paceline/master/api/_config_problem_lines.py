"""Problems of a configuration with the line of its text where each stands."""

from dataclasses import replace

import yaml

from paceline.config import ConfigError, compose_yaml
from paceline.messages.configs import ConfigProblem


def config_problems(error: ConfigError, text: str) -> list[ConfigProblem]:
    """Return what is wrong with the fields of a config."""
    root = compose_yaml(text)
    return [
        ConfigProblem(
            path=problem.path, message=str(problem), line=_line_in_config(root, problem.path)
        )
        for problem in error.problems
    ]


def syntax_problems(error: ConfigError) -> list[ConfigProblem]:
    """Return what is wrong with the text itself; the paths are `config:LINE`."""
    found = []
    for problem in error.problems:
        line = problem.path.rpartition(":")[2]
        number = int(line) if line.isdecimal() else None
        message = str(replace(problem, path="config"))
        found.append(ConfigProblem(path="", message=message, line=number))
    return found


def _line_in_config(node: yaml.Node | None, path: str) -> int | None:
    """Return the line where a dotted path stands, or where the deepest part of it does."""
    line = None
    for name in path.replace("[", ".[").split("."):
        child = _child_in_config(node, name)
        if child is None:
            break
        line, node = child
    return line


def _child_in_config(node: yaml.Node | None, name: str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == name:
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and name[1:-1].isdecimal():
        index = int(name[1:-1])
        if index < len(node.value):
            return node.value[index].start_mark.line + 1, node.value[index]
    return None
