"""Pages of the command line, config fields, REST API, variables and metrics, made from the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from site_pages import DOCS, ROOT, SiteError

from paceline._cluster.master.api.application import describe
from paceline._cluster.master.api.route_scopes import Scopes
from paceline.cli import app
from paceline.cli._command_groups import command_examples
from paceline.config import json_schema

_VARIABLE = re.compile(r"\bPACELINE_[A-Z0-9_]*[A-Z0-9]\b")
_VARIABLE_ROW = re.compile(r"^\| (`PACELINE_.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
_METRIC_ROW = re.compile(r"^\| (`(?:paceline|process)_.*?) \| (.*?) \|$", re.MULTILINE)

# Variables that other pages explain, or that Paceline sets for processes of its own.
_MORE_VARIABLES = {
    "PACELINE_COLLECTIVE_TIMEOUT_S": (
        "set for workers",
        "how long they may wait in a collective operation until they are ended, in seconds",
    ),
    "PACELINE_FAULT": (
        "tests",
        "the point of the code at which a process is hit, and the signal; see"
        " [Exactness](exactness.md)",
    ),
    "PACELINE_FAULT_LOG": ("tests", "file that gets a line for each point that a process reached"),
    "PACELINE_GENERATION": ("set for workers", "the number of the formation of the worker group"),
    "PACELINE_MAX_CONNECTIONS_PER_ADDRESS": (
        "the master",
        "connections of one address; see [limits](cli.md)",
    ),
    "PACELINE_MAX_CONTEXT_MIB": (
        "the master, `paceline e create`",
        "size of an experiment's code, in MiB",
    ),
    "PACELINE_MAX_LOG_MIB": ("the master", "output that is kept of one attempt, in MiB"),
    "PACELINE_MAX_UNPACKED_FILES": (
        "the master, runners",
        "number of files of an experiment's code",
    ),
    "PACELINE_MAX_UNPACKED_MIB": (
        "the master, runners",
        "size of an experiment's code, unpacked, in MiB",
    ),
    "PACELINE_MEETING_PORT": (
        "set for launchers",
        "the port at which the nodes of an attempt meet",
    ),
    "PACELINE_RESTART_CAUSES": ("set for workers", "why the group was formed again"),
    "PACELINE_RUN_DIR": ("set for processes", "the run directory of this attempt"),
    "PACELINE_RUN_MEMORY": ("set for workers", "directory of their states in shared memory"),
    "PACELINE_THREADS": (
        "set for workers",
        "the `OMP_NUM_THREADS` that Paceline chose, not the user",
    ),
    "PACELINE_TRIAL_MEMORY": (
        "set for trials",
        "directory of the trial's states in shared memory; see"
        " [states in memory](checkpoints.md#states-in-memory-under-a-master)",
    ),
    "PACELINE_WORKER_CHANNEL": ("set for workers", "how a worker reaches its driver"),
    "PACELINE_WORKER_GROUP": (
        "set for workers",
        "the mark by which processes of an ended group are found; see [liveness](liveness.md)",
    ),
}


def table_pages() -> dict[str, str]:
    """Return the text of each page by its place; raise `SiteError` if something is missing."""
    return {
        "reference/commands.md": commands_page(),
        "reference/config-fields.md": config_page(),
        "reference/rest-api.md": routes_page(describe()),
        "reference/rest-models.md": models_page(describe()),
        "reference/variables.md": variables_page(),
        "reference/metrics.md": metrics_page(),
    }


def commands_page() -> str:
    """Return the page of all commands: usage, help, arguments, options and examples."""
    parts = [
        "# Commands",
        "Each command of `paceline` with its help and two examples. [The command line](../cli.md)"
        " explains states, JSON, exit codes and limits.",
    ]
    for path, command in _commands(typer.main.get_command(app), "paceline"):
        context = command.context_class(command, info_name=path)
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        help_text = _paragraphs(command.help or "")
        if not help_text:
            raise SiteError(f"{path}: the command has no help.")
        records = [one.get_help_record(context) for one in command.params]
        rows = [_cells(record) for record in records if record is not None]
        level = "##" if path.count(" ") < 2 else "###"
        parts += [f"{level} {path}", f"```\n{usage}\n```", help_text]
        parts += [_table(("Argument or option", "Meaning"), rows)] if rows else []
        parts += [_paragraphs(command.epilog)] if command.epilog else []
        examples = command_examples().get(path.partition(" ")[2], [])
        if not examples and not hasattr(command, "commands"):
            raise SiteError(f"{path}: the command has no example.")
        lines = "\n".join(f"paceline {example}" for example in examples)
        parts += [f"Examples:\n\n```\n{lines}\n```"] if examples else []
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        # Short names such as `e` stand for a group that is shown by its long one.
        if not one.hidden:
            yield from _commands(one, f"{path} {name}")


def _cells(record: tuple[str, str]) -> tuple[str, str]:
    names, text = record
    return f"`{names.replace('|', chr(92) + '|')}`", _cell(text)


def config_page() -> str:
    """Return the page of all fields of an experiment's config, by section."""
    schema = json_schema()
    parts = [
        "# Config fields",
        "All fields, from the JSON Schema of the config."
        " [The experiment config](../experiment-config.md) explains them with examples.",
        "## ExperimentConfig",
        _fields(schema),
    ]
    for name, model in sorted(schema["$defs"].items()):
        parts += [f"## {name}", _paragraphs(model.get("description", "")), _fields(model)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _fields(model: dict[str, Any], page: str = "") -> str:
    needed = model.get("required", ())
    rows = [
        (
            f"`{name}`",
            _type(field, page) + (", required" if name in needed else ""),
            f"`{json.dumps(field['default'])}`" if "default" in field else "",
            _cell(field.get("description", "")),
        )
        for name, field in model.get("properties", {}).items()
    ]
    if rows:
        return _table(("Field", "Type", "Default", "Meaning"), rows)
    return f"Values: {_type(model, page)}."


def _type(field: dict[str, Any], page: str = "") -> str:
    """Return the type of a field of a JSON Schema, with links to the models on a page."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}]({page}#{name.lower()})"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{json.dumps(one)}`" for one in field.get("enum", [field.get("const")]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_type(one, page) for one in field[key]))
    kind = field.get("type", "any")
    if kind == "array":
        return f"array of {_type(field.get('items', {}), page)}"
    if kind == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"object of {_type(field['additionalProperties'], page)}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def routes_page(api: dict[str, Any]) -> str:
    """Return the page of all routes: scope, parameters, body and answers."""
    scopes = Scopes()
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            entry = groups.setdefault(operation.get("tags", ["other"])[0], [])
            scope = scopes.access(method.upper(), path).scope.value
            anchor = operation["operationId"]
            if not operation.get("description"):
                raise SiteError(f"{method.upper()} {path}: the route has no docstring.")
            entry += [
                f"### {method.upper()} `{path}` {{ #{anchor} }}",
                _paragraphs(operation["description"]),
                f"Scope: `{scope}`. {_body(operation)} {_answers(operation)}".replace("  ", " "),
            ]
            rows = [
                (
                    f"`{one['name']}`",
                    one["in"] + (", required" if one.get("required") else ""),
                    _type(one.get("schema", {}), "rest-models.md"),
                    _cell(one.get("description", "")),
                )
                for one in operation.get("parameters", ())
            ]
            entry += [_table(("Parameter", "In", "Type", "Meaning"), rows)] if rows else []
    parts = [
        "# REST API",
        "Programs send `Authorization: Bearer TOKEN`; each route names the scope that the token"
        " needs, see [Security](../security.md). A master shows the same at `/api/v1/docs`, and as"
        " data at `/api/v1/openapi.json`. The [models](rest-models.md) are the bodies of requests"
        " and answers.",
    ]
    for tag, entries in groups.items():
        parts += [f"## {tag.capitalize()}", *entries]
    return "\n\n".join(parts) + "\n"


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    found = [
        f"{_type(one.get('schema', {}), 'rest-models.md')} (`{kind}`)"
        for kind, one in content.items()
    ]
    return f"Body: {' or '.join(found)}." if found else ""


def _answers(operation: dict[str, Any]) -> str:
    found = []
    for status, answer in operation["responses"].items():
        if status.startswith("2"):
            kinds = answer.get("content", {}).items()
            types = [
                _type(one["schema"], "rest-models.md") if one.get("schema") else f"`{kind}`"
                for kind, one in kinds
            ]
            found.append(f"{status}" + (f" {' or '.join(dict.fromkeys(types))}" if types else ""))
    return f"Answer: {', '.join(found)}."


def models_page(api: dict[str, Any]) -> str:
    """Return the page of the models of the REST API."""
    parts = ["# REST models", "The bodies of requests and answers of the [REST API](rest-api.md)."]
    for name, model in sorted(api.get("components", {}).get("schemas", {}).items()):
        parts += [f"## {name}", _paragraphs(model.get("description", "")), _fields(model)]
    return "\n\n".join(part for part in parts if part) + "\n"


def variables_in(source: Path) -> set[str]:
    """Return the variables of the environment that the code below a directory names."""
    found: set[str] = set()
    for path in source.rglob("*.py"):
        found |= set(_VARIABLE.findall(path.read_text(encoding="utf-8")))
    return found


def variables_page(source: Path = ROOT / "src") -> str:
    """Return the page of all variables; raise `SiteError` for one without a text."""
    guide = (DOCS / "cli.md").read_text(encoding="utf-8")
    _, _, section = guide.partition("\n## Environment variables\n")
    rows, before = [], ""
    for names, readers, text in _VARIABLE_ROW.findall(section.partition("\n## ")[0]):
        before = before if readers == "the same" else readers
        rows.append((names, before, text))
    known = set(_VARIABLE.findall(" ".join(names for names, _, _ in rows)))
    rows += [(f"`{name}`", *texts) for name, texts in _MORE_VARIABLES.items() if name not in known]
    known |= _MORE_VARIABLES.keys()
    missing = {
        name
        for name in variables_in(source)
        # The code puts the names of some together from their beginning.
        if not any(one == name or one.startswith(f"{name}_") for one in known)
    }
    if missing:
        raise SiteError(
            "\n".join(f"{name}: the variable has no text." for name in sorted(missing))
            + "\nHint: add a row to docs/cli.md, or to `_MORE_VARIABLES` of site_tables.py."
        )
    rows.sort()
    body = _table(("Variable", "Read by", "Meaning"), [_moved(row) for row in rows])
    return (
        "# Environment variables\n\nAll variables that Paceline reads, or sets for the processes"
        f" that it starts. [The command line](../cli.md) has those of every day.\n\n{body}\n"
    )


def metrics_page() -> str:
    """Return the page of the metrics for Prometheus; the rows are those of the guide."""
    guide = (DOCS / "operations.md").read_text(encoding="utf-8")
    rows = [_moved(row) for row in _METRIC_ROW.findall(guide)]
    return (
        "# Metrics\n\nNumbers of a master for Prometheus, at `/metrics`."
        " [Watch a master](../operations.md) says how to ask for them, and which alerts to set."
        f"\n\n{_table(('Metric', 'Meaning'), rows)}\n"
    )


def _moved(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a row of a guide with its links as a page one folder below needs them."""
    return tuple(re.sub(r"\]\((?=[\w-]+\.md)", "](../", cell) for cell in row)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _paragraphs(text: str) -> str:
    """Return a help text as Markdown: a paragraph whose lines click keeps is a block."""
    parts = [part.strip("\n") for part in text.split("\n\n")]
    return "\n\n".join(
        "```\n" + part.removeprefix("\b").strip("\n") + "\n```"
        if part.startswith("\b")
        else _escaped(part)
        for part in parts
    )


def _escaped(text: str) -> str:
    """Return a text with what looks like HTML outside of code as it is written."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)
