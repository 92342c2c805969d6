"""Plain data in, a config or all its problems out."""

import dataclasses
import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.config._config_problems import MISSING, ConfigError, Problem, join_path
from paceline.config._config_secrets import fill_secrets
from paceline.config._environment_section import Environment
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._method_registry import load_search_methods, searcher_sections
from paceline.config._older_configs import Optimizations
from paceline.config._overrides import apply_overrides
from paceline.config._read_yaml import read_yaml_file
from paceline.config._refused_fields import REFUSED_FIELDS
from paceline.config._reproducibility_and_profiling_sections import Profiling, Reproducibility
from paceline.config._resources_section import Resources, SlotRange
from paceline.config._searcher_section import REMOVED_SEARCHERS, MissingSearcher
from paceline.config._section_base import alias_names, field_names
from paceline.config._storage_section import (
    CLOUD_TYPES,
    DefaultStorage,
    DirectoryStorage,
    S3Storage,
    SharedFsStorage,
    UrlStorage,
)

_STORAGES: dict[str, type[BaseModel]] = {
    "directory": DirectoryStorage,
    "shared_fs": SharedFsStorage,
    "s3": S3Storage,
    "url": UrlStorage,
}
_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    (): ExperimentConfig,
    ("resources",): Resources,
    ("resources", "slots_per_trial", "range"): SlotRange,
    ("reproducibility",): Reproducibility,
    ("environment",): Environment,
    ("profiling",): Profiling,
    ("optimizations",): Optimizations,
    ("checkpoint_storage", "default"): DefaultStorage,
    **{("checkpoint_storage", name): section for name, section in _STORAGES.items()},
}
_UNIONS = (("searcher",), ("checkpoint_storage",), ("resources", "slots_per_trial"))

# What pydantic's error types ask for; the names in braces come from the error's context.
_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a map",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "int_type": "an integer",
    "less_than_equal": "<= {le:.16g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a map of fields",
    "model_type": "a map of fields",
    "string_type": "a string",
}


def load_config(
    source: str | Path | dict[str, Any], overrides: Sequence[str] = ()
) -> ExperimentConfig:
    """Load and check an experiment config.

    Args:
        source: the path of a YAML file, or the config as plain data.
        overrides: fields to set first, each as `a.b=value`. A value that starts with `[`, `{` or a
            quote is YAML, one with a comma is a list of YAML scalars, any other one YAML scalar.

    A secret without a value is taken from the environment of this process.

    Raises:
        ConfigError: the file, an override or the config is not valid, or a secret is not set.
    """
    data = source if isinstance(source, dict) else read_yaml_file(Path(source))
    data = apply_overrides(data, overrides) if overrides else data
    return validate_config(fill_secrets(data, os.environ))


def validate_config(data: dict[str, Any]) -> ExperimentConfig:
    """Check plain data and return it as a config.

    Raises:
        ConfigError: something is wrong; the error holds every problem that was found.
    """
    given: object = data
    if not isinstance(given, dict):
        message, allowed = "must be a map of fields", "fields such as `entrypoint` and `searcher`"
        raise ConfigError([Problem(path="", value=data, message=message, allowed=allowed)])
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as e:
        is_unknown_method = any(
            error["type"] == "union_tag_invalid" and error["loc"] == ("searcher",)
            for error in e.errors(include_url=False)
        )
        if is_unknown_method and load_search_methods():
            return validate_config(data)
        problems = [_config_problem_of(error) for error in _flatten_config_errors(e)]
    # Its text has what pydantic's has, in the user's words.
    raise ConfigError(problems)


def read_stored_config(data: dict[str, Any]) -> ExperimentConfig:
    """Return a config that was resolved and stored before.

    Its search method may be missing by now; its section is a `MissingSearcher` then.

    Raises:
        ConfigError: something else is wrong with it.
    """
    try:
        return validate_config(data)
    except ConfigError as error:
        if any(problem.path.split(".")[0] != "searcher" for problem in error.problems):
            raise
    searcher = MissingSearcher.model_validate(data["searcher"])
    # The other fields are checked against a searcher that fits any of them.
    stand_in = {"name": "single", "metric": searcher.metric, "max_length": {"batches": 1}}
    config = validate_config(data | {"searcher": stand_in})
    return config.model_copy(update={"searcher": searcher})


def _flatten_config_errors(error: ValidationError) -> Iterator[ErrorDetails | Problem]:
    """Yield each error; one about the parts of a value becomes the problems it stands for."""
    for details in error.errors(include_url=False):
        if details["type"] != "refused_parts":
            yield details
            continue
        start = join_path(*_plain_path(details["loc"]))
        for part in details["ctx"]["problems"]:
            yield dataclasses.replace(part, path=join_path(start, part.path))


def _config_problem_of(details: ErrorDetails | Problem) -> Problem:
    if isinstance(details, Problem):
        return details
    kind, path = details["type"], join_path(*_plain_path(details["loc"]))
    value, context = details["input"], details.get("ctx", {})
    if kind == "refused":
        return Problem(path=path, **{"value": value, **context})
    if kind == "extra_forbidden":
        return _unknown_config_field(details["loc"], path, value)
    if kind == "missing":
        return _missing_field(details["loc"], path)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_config_kind(path, value)
    if kind == "invalid_key":
        section = join_path(*_plain_path(details["loc"][:-1]))
        message, hint = "must have strings as names", "put the name in quotes."
        return Problem(path=section, value=details["loc"][-1], message=message, hint=hint)
    if kind not in _ALLOWED:
        return Problem(path=path, value=value, message=f"is not valid: {details['msg']}")
    allowed = _ALLOWED[kind].format(**context)
    for bound in (context[name] for name in ("ge", "gt", "le") if name in context):
        allowed = f"{'an integer' if isinstance(bound, int) else 'a number'} {allowed}"
    return Problem(path=path, value=value, message=f"must be {allowed}", allowed=allowed)


def _plain_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the location without the name of the variant that pydantic puts into it."""
    for union in _UNIONS:
        if location[: len(union)] == union:
            return union + location[len(union) + 1 :]
    return location


def _section_of(location: tuple[int | str, ...]) -> type[BaseModel]:
    return _sections()[tuple(str(part) for part in location[:-1])]


def _sections() -> dict[tuple[str, ...], type[BaseModel]]:
    return _SECTIONS | {("searcher", name): one for name, one in searcher_sections().items()}


def _missing_field(location: tuple[int | str, ...], path: str) -> Problem:
    section, name = _section_of(location), str(location[-1])
    meaning = (section.model_fields[name].description or "").rstrip(".")
    message = f"is required: {meaning[:1].lower()}{meaning[1:]}" if meaning else "is required"
    return Problem(path=path, value=MISSING, message=message)


def _unknown_config_field(location: tuple[int | str, ...], path: str, value: object) -> Problem:
    section, name = _section_of(location), str(location[-1])
    known = sorted(field_names(section))
    if name in known:
        other = next(
            n for n, field in section.model_fields.items() if name in alias_names(n, field)
        )
        message = f"is an older name of `{other}`, which is given as well"
        return Problem(path=path, value=value, message=message, hint="keep one of the two.")
    if section is DefaultStorage and (kind := _storage_with(name)):
        message, hint = "needs the type of the storage", f"add `type: {kind}`."
        return Problem(path=path, value=value, message=message, hint=hint)
    start = str(location[0]) if len(location) > 1 else ""
    refused_field = REFUSED_FIELDS.get(start, {}).get(name)
    if refused_field is not None:
        message, hint = refused_field
        return Problem(path=path, value=value, message=message, hint=hint)
    return Problem(
        path=path,
        value=value,
        message="is not a known field",
        allowed=", ".join(known),
        hint=_did_you_mean(start, name, known),
    )


def _storage_with(field: str) -> str | None:
    for kind, section in _STORAGES.items():
        if field in section.model_fields:
            return kind
    return None


def _did_you_mean(start: str, name: str, known: list[str]) -> str:
    for location, section in _sections().items():
        if name in section.model_fields and location[:1] != ((start,) if start else ()):
            return f"did you mean `{join_path(*location[:1], name)}`?"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else ""


def _wrong_config_kind(path: str, value: object) -> Problem:
    """Return the problem of a searcher or storage that is none of those there are."""
    field, names = ("type", list(_STORAGES))
    if path == "searcher":
        field, names = "name", list(searcher_sections())
    *first, last = (f"`{name}`" for name in names)
    allowed = f"{', '.join(first)} or {last}"
    given = value.get(field, MISSING) if isinstance(value, dict) else value
    message, hint = "is not known", ""
    if given is MISSING:
        message = "is required"
    elif not isinstance(given, str):
        message = "must be a string"
    elif path == "searcher" and given in REMOVED_SEARCHERS:
        message, hint = "is no longer a search method", f"use {REMOVED_SEARCHERS[given]}."
    elif path != "searcher" and given in CLOUD_TYPES:
        message = "is not offered yet"
    else:
        close = difflib.get_close_matches(given, names, n=1)
        hint = f"did you mean `{close[0]}`?" if close else ""
    return Problem(path=f"{path}.{field}", value=given, message=message, allowed=allowed, hint=hint)
