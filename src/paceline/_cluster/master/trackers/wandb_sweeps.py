"""Sweeps of W&B's clients: their configs, and the hyperparameters that their agents ask for."""

import json
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline._base.arguments_and_errors import Rng
from paceline._cluster.master.api.requests_and_answers import ApiError
from paceline._cluster.master.experiments.logged_runs import (
    change_document,
    get_document,
    project_of_document,
)
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.store.reach import creating_in
from paceline._cluster.master.trackers import wandb_runs
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError
from paceline._cluster.master.trackers.wandb_values import parse_json, storable
from paceline.config._read_yaml import parse_yaml
from paceline.search._hyperparameter_kinds import (
    Categorical,
    Const,
    DoubleRange,
    IntRange,
    Leaf,
    LogRange,
    SpaceError,
)
from paceline.search._hyperparameter_space import Space

SWEEP, AGENT = "wandb-sweep", "wandb-agent"
# Parsed in the writer's transaction, for which all others wait.
_MAX_CONFIG = 64 * 1024
_MAX_STEPS = 1_000_000
# A GraphQL Int.
_MAX_COUNT = 2**31 - 1
_METHODS = ("grid", "random")
_STATES = ("RUNNING", "PAUSED", "CANCELED", "FINISHED")
_SERVED = {"method", "parameters", "run_cap", "program", "command"}
_SERVED |= {"name", "description", "project", "entity", "metric"}
_FIELDS = {
    "constant": {"value"},
    "categorical": {"values"},
    "uniform": {"min", "max"},
    "int_uniform": {"min", "max"},
    "q_uniform": {"min", "max", "q"},
    "log_uniform": {"min", "max"},
    "log_uniform_values": {"min", "max"},
}


# ---- configs -----------------------------------------------------------------------------------


def read_config(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a sweep, checked, and what of it is not served.

    Raises:
        ConfigError: The text is no YAML map.
        GraphqlError: The config is too large, or says what is not served.
    """
    if len(text) > _MAX_CONFIG:
        raise GraphqlError(
            f"A sweep's config must have at most {_MAX_CONFIG:,} characters, but has {len(text):,}."
        )
    try:
        packed = json.dumps(parse_yaml(text, file_name="the sweep's config"))
        # Aliases stand for more than the text has.
        config = parse_json(packed) if len(packed) <= 2 * _MAX_CONFIG else None
    except TypeError as error:
        raise GraphqlError(f"A sweep's config must be JSON: {error}.") from error
    if config is None:
        raise GraphqlError(f"A sweep's config must have at most {2 * _MAX_CONFIG:,} bytes as JSON.")
    method, cap = config.get("method"), config.get("run_cap")
    if method not in _METHODS:
        raise GraphqlError(
            f"`method` must be one of {', '.join(_METHODS)}, but got {method!r:.50}. Hint: searches"
            " of `paceline experiment create` learn from their trials."
        )
    if cap is not None and (type(cap) is not int or cap < 1):
        raise GraphqlError(f"`run_cap` must be an integer of at least 1, but got {cap!r:.50}.")
    controller = config.get("controller")
    if controller not in (None, {"type": "cloud"}):
        raise GraphqlError(f"`controller` must be left out, but got {controller!r:.50}.")
    space_of(config)
    odd = sorted(config.keys() - _SERVED - {"controller"})
    texts = {"early_terminate": " Runs go on to their end."}
    warnings = [f"`{name:.100}` is not served here.{texts.get(name, '')}" for name in odd[:20]]
    return config, warnings


def space_of(config: Mapping[str, Any]) -> Space:
    """Return the space of a config's parameters.

    Raises:
        GraphqlError: They are wrong, or no grid although the method is one.
    """
    try:
        space = Space(_group("parameters", config.get("parameters")))
    except SpaceError as error:
        raise GraphqlError(str(error)) from error
    if config.get("method") == "grid":
        try:
            space.grid_size()
        except SpaceError as error:
            raise GraphqlError(
                f"`{error.path.removesuffix('.count')}` must be `values`, a `value`, or a"
                " `distribution` of int_uniform or q_uniform for the method grid, but has no end of"
                " points. Hint: the method random draws real numbers."
            ) from error
    return space


def _group(path: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not given or "" in given:
        raise GraphqlError(
            f"`{path}` must be a map of names to parameters, but got {given!r:.100}."
        )
    return {name: _node(f"{path}.{name}", given[name]) for name in sorted(given)}


def _node(path: str, given: Any) -> Leaf | dict[str, Any]:
    if not isinstance(given, dict):
        raise GraphqlError(
            f"`{path}` must be a map such as `{{values: [1, 2]}}`, but got {given!r:.100}."
        )
    if given.keys() == {"parameters"}:
        return _group(path, given["parameters"])
    kind = str(given.get("distribution") or _usual_kind(given))
    fields, got = _FIELDS.get(kind), sorted(given.keys() - {"distribution"})
    if fields is None:
        raise GraphqlError(
            f"`{path}.distribution` must be one of {', '.join(_FIELDS)}, but got {kind!r:.50}."
        )
    if set(got) != fields and not (kind == "q_uniform" and set(got) == {"min", "max"}):
        raise GraphqlError(
            f"`{path}` must have {', '.join(sorted(fields))} for the distribution {kind}, but has"
            f" {', '.join(got) or 'nothing'!s:.200}."
        )
    if kind == "constant":
        return Const.of(path, given["value"])
    if kind == "categorical":
        return Categorical.parse(path, {"vals": given["values"]})
    return _range(path, kind, *(_number(path, given, name) for name in ("min", "max", "q")))


def _usual_kind(given: Mapping[str, Any]) -> str:
    """Return the distribution of a parameter that names none."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical"
    is_whole = all(type(given.get(name)) is int for name in ("min", "max"))
    return "int_uniform" if is_whole else "uniform"


def _number(path: str, given: Mapping[str, Any], name: str) -> Any:
    value = given.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraphqlError(f"`{path}.{name}` must be a finite number, but got {value!r:.50}.")
    return value


def _range(path: str, kind: str, low: Any, high: Any, step: Any) -> Leaf:
    if not low < high:
        raise GraphqlError(f"`{path}.min` must be less than `max` ({high}), but got {low}.")
    bounds = {"minval": low, "maxval": high}
    if kind == "uniform":
        return DoubleRange.parse(path, bounds)
    if kind == "int_uniform":
        leaf = IntRange.parse(path, bounds)
        return IntRange.parse(path, {**bounds, "count": leaf.maxval - leaf.minval + 1})
    if kind == "log_uniform":
        return LogRange.parse(path, {**bounds, "base": math.e})
    if kind == "log_uniform_values":
        if low <= 0:
            raise GraphqlError(f"`{path}.min` must be greater than 0, but got {low}.")
        logs = {"minval": math.log(low), "maxval": math.log(high)}
        return LogRange.parse(path, {**logs, "base": math.e})
    return _multiples(path, low, high, step)


@dataclass(frozen=True, slots=True)
class _Multiples(IntRange):
    """A multiple of a step; the range counts the steps."""

    step: Any

    def sample(self, rng: Rng) -> Any:
        """Draw a multiple, all equally likely."""
        return _times(IntRange.sample(self, rng), self.step)

    def point(self, index: int) -> Any:
        """Return a multiple of the grid."""
        return _times(IntRange.point(self, index), self.step)


def _times(number: int, step: Any) -> Any:
    """Return a multiple without the noise of binary fractions."""
    found = number * step
    return found if type(found) is int else float(f"{found:.12g}")


def _multiples(path: str, low: Any, high: Any, step: Any) -> Leaf:
    if step <= 0 or not (high - low) / step < _MAX_STEPS:
        raise GraphqlError(
            f"`{path}.q` must be greater than 0 and make at most {_MAX_STEPS:,} steps from `min` to"
            f" `max`, but got {step}."
        )
    # A bound that is a multiple itself may be off by its rounding.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if first > last:
        raise GraphqlError(f"`{path}` must have a multiple of {step} from {low} to {high}.")
    if first == last:
        return Const.of(path, _times(first, step))
    return _Multiples(path, first, last, last - first + 1, step)


def point_of(document: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Return the hyperparameters of a sweep's run by its number from 0; None after the last.

    They follow from the sweep's document alone: a restarted master gives the same ones.
    """
    space, is_grid = space_of(document), document["method"] == "grid"
    end = min(document["run_cap"] or math.inf, space.grid_size() if is_grid else math.inf)
    if number >= end:
        return None
    if is_grid:
        return space.grid_point(number)
    return space.sample(Rng((document["seed"] + number) % 2**32))


# ---- sweeps and agents -------------------------------------------------------------------------


def _store(
    asked: wandb_runs.Asked, kind: str, place: wandb_runs.RunPlace, name: str, document: Any
) -> None:
    connection = asked.writer.connection
    parent = place.parent if kind == SWEEP else "/".join(place)
    project = project_of_document(connection, (wandb_runs.PROJECT, place.entity, place.project))
    with creating_in(project):
        change_document(connection, kind, parent, name, lambda _: document)


def _known_sweep(asked: wandb_runs.Asked, place: wandb_runs.RunPlace) -> dict[str, Any]:
    document: Any = get_document(asked.connection, SWEEP, place.parent, place.name)
    if document is None:
        raise NotFoundError(f"There is no sweep {'/'.join(place)!r}.")
    found: dict[str, Any] = document
    return found


def sweep_view(place: wandb_runs.RunPlace, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a sweep, without its runs."""
    is_over = point_of(document, document["num_given"]) is None
    size = space_of(document).grid_size() if document["method"] == "grid" else None
    sizes = [each for each in (document["run_cap"], size) if each]
    return {
        "__typename": "Sweep",
        "id": wandb_runs.encode_id("Sweep", "v1", place.name, place.project, place.entity),
        "name": place.name,
        "displayName": document["displayName"],
        "description": document["description"],
        "method": document["method"],
        "state": "FINISHED" if is_over and document["state"] == "RUNNING" else document["state"],
        "config": document["text"],
        "createdAt": wandb_runs.iso_time(document["created"]),
        "updatedAt": wandb_runs.iso_time(document["created"]),
        "heartbeatAt": wandb_runs.iso_time(document["created"]),
        "runCount": document["num_given"],
        "runCountExpected": min(*sizes, _MAX_COUNT) if sizes else None,
        "bestLoss": None,
        "earlyStopJobRunning": False,
        "controller": None,
        "scheduler": None,
    }


def upsert_sweep(
    asked: wandb_runs.Asked, given: Mapping[str, Any]
) -> tuple[wandb_runs.RunPlace, Any, list[str]]:
    """Create a sweep, or change its state or config; return what of its config is not served."""
    for name in ("launchScheduler", "scheduler", "controller"):
        if given.get(name) not in (None, "", "null"):
            raise GraphqlError(f"`{name}` must be left out: the master here gives out the runs.")
    if given.get("id") is None:
        names = given.get("entityName"), given.get("projectName")
        place = wandb_runs.checked_place(*names, secrets.token_hex(6))
        wandb_runs.upsert_project(asked, place.entity, place.project)
        document: dict[str, Any] = {
            "created": time.time(),
            "seed": secrets.randbelow(2**32),
            "num_given": 0,
        }
        document |= {"state": "RUNNING", "displayName": None, "description": None}
    else:
        parts = wandb_runs.decode_id(given["id"], "Sweep")
        if len(parts) != 4:
            raise GraphqlError(f"There is no Sweep with the id {given['id']!r:.200}.")
        place = wandb_runs.checked_place(parts[3], parts[2], parts[1])
        document = _known_sweep(asked, place)
    warnings: list[str] = []
    if isinstance(given.get("config"), str) or "text" not in document:
        config, warnings = read_config(str(given.get("config") or ""))
        search = {name: config.get(name) for name in ("method", "parameters")}
        if document["num_given"] and any(document[name] != search[name] for name in search):
            raise GraphqlError(
                "`method` and `parameters` of a sweep must stay once it has given out runs. Hint:"
                " make another sweep."
            )
        document |= search | {"text": storable(given["config"]), "run_cap": config.get("run_cap")}
        document |= {name: config.get(name) for name in ("program", "description")}
        document["displayName"] = str(config.get("name") or place.name)[:4096]
    if given.get("priorRunsFilters"):
        warnings.append("Prior runs are not added here.")
    if isinstance(given.get("displayName"), str):
        document["displayName"] = storable(given["displayName"])[:4096]
    if given.get("state") is not None:
        if given["state"] not in _STATES:
            raise GraphqlError(
                f"`state` must be one of {', '.join(_STATES)}, but got {given['state']!r:.50}."
            )
        document["state"] = given["state"]
    _store(asked, SWEEP, place, place.name, document)
    return place, document, warnings


def create_agent(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> dict[str, Any]:
    """Register an agent of a sweep."""
    names = given.get("entityName"), given.get("projectName"), given.get("sweep")
    if not names[2]:
        raise GraphqlError("`sweep` must name a sweep, but is missing.")
    place, name = wandb_runs.checked_place(*names), secrets.token_hex(8)
    _known_sweep(asked, place)
    host = storable(str(given.get("host") or ""))[:200]
    agent = {"host": host, "created": time.time(), "run": None, "args": None, "is_heard": False}
    _store(asked, AGENT, place, name, agent)
    return {
        "agent": {"id": wandb_runs.encode_id("Agent", *place, name), "name": name, "host": host}
    }


def beat(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> dict[str, Any]:
    """Answer an agent's heartbeat with its next run, if it has none.

    Raises:
        ApiError: There is no such agent; the client ends after this status only.
    """
    *names, name = wandb_runs.decode_id(given.get("id"), "Agent")
    place = wandb_runs.checked_place(*names) if len(names) == 3 else None
    agent = place and get_document(asked.connection, AGENT, "/".join(place), name)
    if place is None or agent is None:
        raise ApiError(404, "not_found", f"There is no agent {name!r:.100} of a sweep here.")
    sweep = _known_sweep(asked, place)
    states = wandb_runs.json_object("runState", str(given.get("runState") or "{}"), _MAX_CONFIG)
    running = [run for run, is_running in states.items() if is_running]
    agent["is_heard"] |= agent["run"] in running
    command: dict[str, Any] | None = None
    if sweep["state"] == "CANCELED" or (sweep["state"] == "FINISHED" and not running):
        command = {"type": "exit"}
    elif sweep["state"] == "RUNNING" and not running:
        command = _next_run(asked, place, sweep, agent)
    # Stored in any case: who may not change the sweep's project is refused here.
    _store(asked, AGENT, place, name, agent | {"beat": time.time()})
    return {"agent": {"id": given["id"]}, "commands": json.dumps([command] if command else [])}


def _next_run(
    asked: wandb_runs.Asked,
    place: wandb_runs.RunPlace,
    sweep: dict[str, Any],
    agent: dict[str, Any],
) -> dict[str, Any]:
    is_lost = agent["run"] is not None and not agent["is_heard"]
    if is_lost and asked.document(place._replace(name=agent["run"])) is None:
        # The answer may have been lost; once more, but not for ever: a script may log nothing.
        agent["is_heard"] = True
    else:
        point = point_of(sweep, sweep["num_given"])
        if point is None:
            return {"type": "exit"}
        agent |= {"run": secrets.token_hex(6), "is_heard": False}
        agent["args"] = {name: {"value": value} for name, value in point.items()}
        sweep["num_given"] += 1
        _store(asked, SWEEP, place, place.name, sweep)
    found = {"type": "run", "run_id": agent["run"], "args": agent["args"]}
    return found | {"program": sweep["program"]}
