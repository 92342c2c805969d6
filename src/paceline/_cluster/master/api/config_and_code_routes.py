"""Routes of configurations and code: submitted and resolved forms, and problems."""

import asyncio
import hashlib
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
import yaml
from fastapi import Path as PathParameter
from fastapi import Request, Response
from fastapi.responses import FileResponse

from paceline._base.files import open_private, replacing_atomically, sync_directory
from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.access_guard import IdentityOf
from paceline._cluster.master.api.attempt_and_log_routes import may_name_directories
from paceline._cluster.master.api.experiment_routes import ExperimentId, project_id_of
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.config_rules import read_rules
from paceline._cluster.master.experiments.storage_calls import in_own_thread
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.reach import (
    NotAllowedError,
    creating_in,
    current_project,
    is_restricted,
)
from paceline._cluster.master.store.upgrades import note_contexts
from paceline._cluster.messages.experiment_models import CodeFile
from paceline._cluster.messages.search_and_metric_models import (
    CheckedConfig,
    ConfigProblem,
    ConfigText,
    ConfigView,
)
from paceline._cluster.runner.attempt_preparation import is_shortage
from paceline._cluster.runner.code_archive import (
    ArchiveLimits,
    ArchiveTooLargeError,
    check_archive,
    members,
    open_archive,
)
from paceline.config._config_rules import (
    Rule,
    config_layers,
    fill_config,
    filled_fields,
    policy_problems,
)
from paceline.config._environment_and_secrets import hide_in_text, hide_secrets
from paceline.config._fields_and_problems import ConfigError
from paceline.config._read_yaml import compose_yaml, parse_yaml
from paceline.config._validate_config import json_schema, validate_config


def config_problems(error: ConfigError, text: str) -> list[ConfigProblem]:
    """Return the problems of a configuration's fields, with line numbers."""
    root = compose_yaml(text)
    return [
        ConfigProblem(
            path=problem.path, message=str(problem), line=_line_in_config(root, problem.path)
        )
        for problem in error.problems
    ]


def syntax_problems(error: ConfigError) -> list[ConfigProblem]:
    """Return the syntax problems of a configuration text; error paths are `config:LINE`."""
    found = []
    for problem in error.problems:
        line = problem.path.rpartition(":")[2]
        number = int(line) if line.isdecimal() else None
        message = str(replace(problem, path="config"))
        found.append(ConfigProblem(path="", message=message, line=number))
    return found


def _line_in_config(node: yaml.Node | None, path: str) -> int | None:
    """Return the line of a dotted path, or of its deepest existing part; None if absent."""
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


config_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_MAX_FILE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
# Limit for the file system of a directory that a config names.
_DIRECTORY_S = 2.0


@config_router.get("/experiments/{experiment_id}/config")
def read_config(experiment_id: ExperimentId, records: models.RecordsOf) -> ConfigView:
    """Read an experiment's configuration as submitted and as resolved; secrets are `***`."""
    with records.database.read() as connection:
        row = models.experiment_row(connection, experiment_id)
    shown = hide_secrets(row.config)
    submitted = row.submitted_config
    if submitted is not None and shown != row.config:
        submitted = hide_in_text(submitted)
    return ConfigView(
        submitted=submitted,
        resolved=shown,
        resolved_yaml=records.encodings.encoded(
            ("config as YAML", shown), lambda: _encode_yaml(shown)
        ).decode(),
    )


@config_router.get("/experiments/{experiment_id}/files")
def list_code(experiment_id: ExperimentId, master: models.MasterOf) -> list[CodeFile]:
    """List the files of an experiment's code; empty for code run in its own directory."""
    path = _context_path(master, experiment_id)
    if path is None:
        return []
    return [CodeFile(path=name, size=size) for name, size in _list_files(path)]


@config_router.get(
    "/experiments/{experiment_id}/files/{path:path}",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, "application/octet-stream": {}}}},
)
def read_code(experiment_id: ExperimentId, path: str, master: models.MasterOf) -> Response:
    """Read a file of an experiment's code; text files are always served as plain text."""
    context = _context_path(master, experiment_id)
    sizes = {} if context is None else dict(_list_files(context))
    if context is None or path not in sizes:
        raise models.ApiError(404, "not_found", f"Experiment {experiment_id} has no file {path!r}.")
    if sizes[path] > _MAX_FILE_BYTES:
        message = f"A file to be shown must have at most {_MAX_FILE_BYTES} bytes, but {path!r} has"
        raise models.ApiError(413, "file_too_large", f"{message} {sizes[path]}.")
    content = _read_file(context, path)
    # Never the type of the name: a page among the code would run with the reader's sign-in.
    kind = "text/plain; charset=utf-8" if _is_text(content) else "application/octet-stream"
    return Response(content, media_type=kind)


@config_router.get("/config-schema")
def read_config_schema() -> dict[str, Any]:
    """Read the JSON Schema of the experiment config."""
    return json_schema()


@config_router.post("/check-config")
def check_config(
    request: ConfigText, identity: IdentityOf, master: models.MasterOf
) -> CheckedConfig:
    """Parse and check a configuration without creating anything; its problems are the answer.

    It is checked as one for an experiment of the project: with what it gets from templates, and for
    the policies.
    """
    try:
        data = parse_yaml(request.text, file_name="config")
    except ConfigError as error:
        return CheckedConfig(config=None, problems=syntax_problems(error))
    try:
        rules = _rules_for(master, request.project)
        layers = config_layers(rules, request.template)
        checked = validate_config(fill_config(layers, data) if isinstance(data, dict) else data)
        if problems := policy_problems(rules, checked.to_json()):
            raise ConfigError(problems)
    except ConfigError as error:
        return CheckedConfig(config=data, problems=config_problems(error, request.text))
    warnings = list(checked.warnings)
    directory = checked.environment.working_dir
    if directory is not None and may_name_directories(identity) and _is_missing(directory):
        warnings.append(
            "`environment.working_dir` must be a directory on the machine that trains, but"
            f" {directory} is none on the master's machine. Hint: correct it, or upload the code."
        )
    return CheckedConfig(
        config=data,
        problems=[],
        warnings=warnings,
        filled=filled_fields(layers, data),
        resolved=hide_secrets(checked.to_json()),
    )


def _rules_for(master: Master, project: str | None) -> list[Rule]:
    """Return the rules for what the sender creates; none for a sender who may create nothing."""
    try:
        with (
            creating_in(project_id_of(master, project)),
            master.database.read(everything=True) as connection,
        ):
            return read_rules(connection, current_project())
    except NotAllowedError:
        return []


def _is_missing(directory: str) -> bool:
    """Return whether a directory is not there; not if its file system gives no answer in time."""
    try:
        return not in_own_thread(Path(directory).is_dir).result(_DIRECTORY_S)
    except (TimeoutError, OSError, ValueError):
        return False


def _encode_yaml(config: dict[str, Any]) -> bytes:
    return bytes(yaml.safe_dump(config, sort_keys=False, allow_unicode=True, encoding="utf-8"))


def _context_path(master: Master, experiment_id: int) -> Path | None:
    with master.database.read() as connection:
        digest = models.experiment_row(connection, experiment_id).context_digest
    path = master.home.contexts_path / f"{digest}.tar.gz"
    return path if digest is not None and path.is_file() else None


@contextmanager
def reading_code(context: Path) -> Iterator[tuple[tarfile.TarFile, Iterator[tarfile.TarInfo]]]:
    """Open packed code, and its members within the limits.

    Raises:
        ApiError: It cannot be unpacked.
    """
    try:
        with open_archive(context, limits := ArchiveLimits.from_environment()) as archive:
            yield archive, members(archive, limits)
    except (tarfile.TarError, EOFError, OSError, ArchiveTooLargeError) as error:
        raise models.ApiError(
            409, "code_unreadable", f"The code cannot be unpacked: {error}."
        ) from error


@lru_cache(maxsize=32)
def _list_files(context: Path) -> tuple[tuple[str, int], ...]:
    """Return names and sizes; a context never changes, as its name is its digest."""
    with reading_code(context) as (_, found):
        return tuple(sorted({one.name: one.size for one in found if one.isfile()}.items()))


def _read_file(context: Path, path: str) -> bytes:
    with reading_code(context) as (archive, listed):
        found = [one for one in listed if one.name == path][-1]
        file = archive.extractfile(found)
        assert file is not None
        return b"".join(iter(lambda: file.read(_PIECE_BYTES), b""))


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    # Zeros are valid UTF-8, but no text.
    return b"\0" not in content


context_upload_router = ApiRouter(tags=["master"], route_class=ReadingRoute)

Digest = Annotated[str, PathParameter(pattern="^[0-9a-f]{64}$")]


@context_upload_router.put("/contexts/{digest}", status_code=204)
async def store_context(digest: Digest, request: Request, master: models.MasterOf) -> None:
    """Store a packed context directory under the SHA-256 of its bytes."""
    path = master.home.contexts_path / f"{digest}.tar.gz"
    try:
        with replacing_atomically(path, mode=0o600) as part:
            if await _receive_context(request, part) != digest:
                message = "The body must have the SHA-256 named in the path."
                raise models.ApiError(422, "wrong_digest", message)
            await asyncio.to_thread(check_archive, part, ArchiveLimits.from_environment())
            # First, so that no file is there that the database does not know, whenever the master
            # dies.
            await models.write_rows(master, lambda transaction: note_contexts(transaction, digest))
        await asyncio.to_thread(sync_directory, path.parent)
    except ArchiveTooLargeError as error:
        raise models.ApiError(413, "context_too_large", str(error)) from error
    except OSError as error:
        if not is_shortage(error):
            raise
        detail = f"The code cannot be stored: {error.strerror}."
        raise models.ApiError(503, "storage_unavailable", detail) from error


async def _receive_context(request: Request, path: Path) -> str:
    """Write a body to a private file, flushed to disk, and return its SHA-256."""
    digest = hashlib.sha256()
    with open_private(path, "wb") as file:
        async for piece in request.stream():
            digest.update(piece)
            # A slow disk must not hold up the event loop.
            await asyncio.to_thread(file.write, piece)
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    return digest.hexdigest()


def _is_seen(master: Master, digest: str) -> bool:
    """Return whether an experiment that the sender sees has a context."""
    experiments = tables.experiments.c
    with master.database.read() as connection:
        query = sa.select(experiments.id).where(experiments.context_digest == digest).limit(1)
        return not is_restricted(connection) or connection.execute(query).first() is not None


@context_upload_router.get("/contexts/{digest}", response_class=FileResponse)
def read_context(digest: Digest, master: models.MasterOf, identity: IdentityOf) -> FileResponse:
    """Read a packed context directory; an attempt reads its own only."""
    assert identity is not None
    attempt_id = identity.attempt_id
    if attempt_id is not None and not master.attempt_tokens.has_code(attempt_id, digest):
        raise models.ApiError(
            403, "scope_too_low", f"Attempt {attempt_id} runs other code than {digest}."
        )
    path = master.home.contexts_path / f"{digest}.tar.gz"
    if not path.is_file() or not _is_seen(master, digest):
        raise models.ApiError(404, "not_found", f"There is no context {digest}.")
    return FileResponse(path, media_type="application/gzip")
