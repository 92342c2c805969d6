"""Routes of configurations and code: as submitted, as resolved, and what would be wrong."""

import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from fastapi import Response

from paceline.config import (
    ConfigError,
    hide_in_text,
    hide_secrets,
    json_schema,
    parse_yaml,
    validate_config,
)
from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._config_problem_lines import config_problems, syntax_problems
from paceline.master.api._experiment_routes import ExperimentId
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, RecordsOf, experiment_row
from paceline.messages.configs import CheckedConfig, CodeFile, ConfigText, ConfigView
from paceline.runner import ArchiveLimits, ArchiveTooLargeError, members, open_archive

router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_MAX_FILE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024


@router.get("/experiments/{experiment_id}/config")
def read_config(experiment_id: ExperimentId, records: RecordsOf) -> ConfigView:
    """Read an experiment's configuration as submitted and as resolved; secrets are `***`."""
    with records.database.read() as connection:
        row = experiment_row(connection, experiment_id)
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


@router.get("/experiments/{experiment_id}/files")
def list_code(experiment_id: ExperimentId, master: MasterOf) -> list[CodeFile]:
    """List the files of an experiment's code; none if it runs in a directory of its own."""
    path = _context_path(master, experiment_id)
    if path is None:
        return []
    return [CodeFile(path=name, size=size) for name, size in _list_files(path)]


@router.get(
    "/experiments/{experiment_id}/files/{path:path}",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, "application/octet-stream": {}}}},
)
def read_code(experiment_id: ExperimentId, path: str, master: MasterOf) -> Response:
    """Read one file of an experiment's code; a text comes as text, whatever it is for."""
    context = _context_path(master, experiment_id)
    sizes = {} if context is None else dict(_list_files(context))
    if context is None or path not in sizes:
        raise ApiError(404, "not_found", f"Experiment {experiment_id} has no file {path!r}.")
    if sizes[path] > _MAX_FILE_BYTES:
        message = f"A file to be shown must have at most {_MAX_FILE_BYTES} bytes, but {path!r} has"
        raise ApiError(413, "file_too_large", f"{message} {sizes[path]}.")
    content = _read_file(context, path)
    # Never as what the name says: a page among the code would run with the reader's sign-in.
    kind = "text/plain; charset=utf-8" if _is_text(content) else "application/octet-stream"
    return Response(content, media_type=kind)


@router.get("/config-schema")
def read_config_schema() -> dict[str, Any]:
    """Read the JSON Schema of the experiment config."""
    return json_schema()


@router.post("/check-config")
def check_config(request: ConfigText) -> CheckedConfig:
    """Parse and check a configuration without creating anything; its problems are the answer."""
    try:
        data = parse_yaml(request.text, file_name="config")
    except ConfigError as error:
        return CheckedConfig(config=None, problems=syntax_problems(error))
    try:
        checked = validate_config(data)
    except ConfigError as error:
        return CheckedConfig(config=data, problems=config_problems(error, request.text))
    return CheckedConfig(config=data, problems=[], warnings=list(checked.warnings))


def _encode_yaml(config: dict[str, Any]) -> bytes:
    return bytes(yaml.safe_dump(config, sort_keys=False, allow_unicode=True, encoding="utf-8"))


def _context_path(master: Master, experiment_id: int) -> Path | None:
    with master.database.read() as connection:
        digest = experiment_row(connection, experiment_id).context_digest
    path = master.home.contexts_path / f"{digest}.tar.gz"
    return path if digest is not None and path.is_file() else None


@lru_cache(maxsize=32)
def _list_files(context: Path) -> tuple[tuple[str, int], ...]:
    """Return names and sizes; a context never changes, as its name is its digest."""
    try:
        with open_archive(context, limits := ArchiveLimits.from_environment()) as archive:
            found = {one.name: one.size for one in members(archive, limits) if one.isfile()}
    except (tarfile.TarError, EOFError, OSError, ArchiveTooLargeError) as error:
        raise ApiError(409, "code_unreadable", f"The code cannot be unpacked: {error}.") from error
    return tuple(sorted(found.items()))


def _read_file(context: Path, path: str) -> bytes:
    with open_archive(context, limits := ArchiveLimits.from_environment()) as archive:
        found = [one for one in members(archive, limits) if one.name == path][-1]
        file = archive.extractfile(found)
        assert file is not None
        return b"".join(iter(lambda: file.read(_PIECE_BYTES), b""))


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
