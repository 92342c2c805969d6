"""The `hyperparameters` section, checked by the search package part by part."""

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationInfo

from paceline.config._config_problems import MISSING, Problem, join_path, refused, refused_parts
from paceline.config._json_maps import copy_json_map

_MAX_GRID_POINTS = 100_000
_SENTENCE = re.compile(
    r"^`(?P<path>[^`]+)` (?P<message>.*?)(?:, but (?:it is missing|got .*))?\.$", re.DOTALL
)


def check_hyperparameter_space(value: Any, info: ValidationInfo) -> Any:
    """Refuse a space that cannot be searched; for use as a validator after the searcher's."""
    if not isinstance(value, dict):
        return value
    space, problems = copy_json_map(value)
    reported = {problem.path for problem in problems}
    for names, node in _hyperparameter_leaves(space, ()):
        problem = _leaf_problem(names, node)
        if problem is not None and problem.path not in reported:
            problems.append(problem)
    searcher = info.data.get("searcher")
    if not problems and searcher is not None and searcher.needs_counts:
        problems = _grid_problems(space)
    if problems:
        raise refused_parts(problems)
    return space


def _hyperparameter_leaves(
    node: dict[str, Any], names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, child in node.items():
        if isinstance(child, dict) and "type" not in child:
            yield from _hyperparameter_leaves(child, (*names, name))
        else:
            yield (*names, name), child


def _leaf_problem(names: tuple[str, ...], node: Any) -> Problem | None:
    from paceline.search import SpaceError, parse_space

    # The search stops at the first error, so each leaf goes there alone, inside its own groups.
    alone: Any = node
    for name in reversed(names):
        alone = {name: alone}
    try:
        parse_space(alone)
    except SpaceError as e:
        return _hyperparameter_problem_of(e.path, str(e), alone)
    return None


def _hyperparameter_problem_of(path: str, text: str, space: dict[str, Any]) -> Problem:
    sentence, _, hint = text.partition("\nHint: ")
    match = _SENTENCE.match(sentence)
    if match is None:
        message = f"is not valid: {sentence}"
    elif path.startswith(f"{match['path']}."):
        message = f"is not allowed, as `{match['path']}` {match['message']}"
    else:
        path, message = match["path"], match["message"]
    return Problem(path=path, value=_hyperparameter_at(space, path), message=message, hint=hint)


def _hyperparameter_at(space: Any, path: str) -> Any:
    value = space
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict):
            value = value.get(part, MISSING)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def _grid_problems(space: dict[str, Any]) -> list[Problem]:
    from paceline.search import parse_space

    problems = [
        Problem(
            path=join_path(*names, "count"),
            value=MISSING,
            message="is required by a grid search",
            allowed="an integer >= 1, the number of values to try",
        )
        for names, node in _hyperparameter_leaves(space, ())
        if isinstance(node, dict)
        and node["type"] in ("int", "double", "log")
        and node.get("count") is None
    ]
    if not problems:
        num_points = parse_space(space).grid_size()
        if num_points > _MAX_GRID_POINTS:
            raise refused(
                f"must not span a grid of more than {_MAX_GRID_POINTS} points, which has "
                f"{num_points if num_points < 10**15 else f'10^{int(math.log10(num_points))}'}",
                hint="lower the counts, or use the searcher `random`.",
            )
    return problems
