"""Templates and policies for configs, as stored, and what they make of experiments."""

from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.reach import DEFAULT_PROJECT
from paceline._cluster.messages.states import ExperimentState
from paceline.config._config_rules import Rule, config_layers, fill_config, policy_problems
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._fields_and_problems import ConfigError

KINDS = ("template", "policy")
"""Kinds of documents that are rules for configs; their project is that of the experiments."""
ALL_PROJECTS = 0
"""Project of rules for all projects."""

_documents, _projects = tables.documents, user_tables.projects


def read_rules(connection: sa.Connection, project_id: int) -> list[Rule]:
    """Return the rules for experiments of a project, those for all projects first.

    Args:
        connection: Shows all projects.
        project_id: The project.

    Raises:
        NotFoundError: It was deleted meanwhile.
    """
    project = connection.scalar(sa.select(_projects.c.name).where(_projects.c.id == project_id))
    if project is None and project_id != DEFAULT_PROJECT:
        raise NotFoundError("There is no such project any more.")
    columns = _documents.c
    query = sa.select(columns.kind, columns.name, columns.project_id, columns.content).where(
        columns.kind.in_(KINDS), columns.parent.in_([str(ALL_PROJECTS), str(project_id)])
    )
    return [
        Rule(row.kind, row.name, project if row.project_id else None, row.content["rule"])
        for row in connection.execute(query.order_by(columns.project_id, columns.name))
    ]


def fill_new_config(
    connection: sa.Connection, project_id: int, config: dict[str, Any], template: str | None = None
) -> dict[str, Any]:
    """Return a config with its open fields taken from templates and policies.

    Raises:
        ConfigError: There is no such template.
    """
    return fill_config(config_layers(read_rules(connection, project_id), template), config)


def check_new_config(connection: sa.Connection, project_id: int, config: ExperimentConfig) -> None:
    """Refuse a config against the policies of its project.

    Raises:
        ConfigError: It does not.
    """
    if problems := policy_problems(read_rules(connection, project_id), config.to_json()):
        raise ConfigError(problems)


def check_changed_config(
    connection: sa.Connection,
    row: sa.Row[Any],
    *,
    config: ExperimentConfig | None = None,
    is_reopened: bool = False,
    **changed: Any,
) -> None:
    """Refuse a change of an experiment by which it would meet a policy no more.

    What it did not meet before, as the policy is newer, does not count, unless it is reopened or
    gets into another project. Runs without this master and ended experiments may move.

    Args:
        connection: Shows all projects.
        row: The experiment as it is.
        config: Its config after the change, if it has another.
        is_reopened: Whether it has ended and goes on.
        changed: Columns of the row after the change.

    Raises:
        ConfigError: A policy would not be met.
    """
    project_id = changed.get("project_id", row.project_id)
    rules = read_rules(connection, project_id)
    if row.external_id is not None or not any(one.kind == "policy" for one in rules):
        return
    is_moved = project_id != row.project_id
    if is_moved and ExperimentState(row.state).is_terminal:
        return
    before = config_of(row)
    problems = policy_problems(rules, _told(row, config or before, changed))
    if not (is_reopened or is_moved):
        known = set(map(str, policy_problems(rules, _told(row, before, {}))))
        problems = [one for one in problems if str(one) not in known]
    if problems:
        raise ConfigError(problems)


def _told(row: sa.Row[Any], config: ExperimentConfig, changed: dict[str, Any]) -> dict[str, Any]:
    """Return a config with what the experiment has in place of it."""
    values = {**row._mapping, **changed}
    told = config.to_json()
    told |= {name: values[name] for name in ("name", "description", "labels")}
    searcher = told["searcher"]
    more = (searcher["limits"] or {}).get("max_trials")
    if more is not None and more > (searcher.get("max_trials") or more):
        # A search that goes on for more trials than it had planned has that many.
        searcher["max_trials"] = more
    for name in ("priority", "weight", "max_slots"):
        if values[name] is not None:
            # 0 is no limit of slots.
            told["resources"][name] = values[name] or None
    return told
