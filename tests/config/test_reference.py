"""The field reference in the documentation says what the code does."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.config import ExperimentConfig, validate_config
from paceline.config._checkpoint_storage_section import (
    DirectoryStorage,
    S3Storage,
    SharedFsStorage,
    UrlStorage,
)
from paceline.config._environment_and_secrets import Environment, Notify, Threshold
from paceline.config._experiment_config import (
    Idle,
    Interactive,
    LogPolicy,
    Profiling,
    Reproducibility,
    Resources,
    SlotRange,
)
from paceline.config._fields_and_problems import REFUSED_FIELDS, Optimizations
from paceline.config._read_yaml import parse_yaml
from paceline.config._searcher_registry import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    GridSearcher,
    HyperbandSearcher,
    MedianStoppingSearcher,
    PbtSearcher,
    RandomSearcher,
    SingleSearcher,
)
from paceline.config._searcher_section import SamplerSection, SearchLimits

REFERENCE = Path(__file__).parents[2] / "docs" / "experiment-config.md"

SECTIONS: dict[str, list[type[BaseModel]]] = {
    "": [ExperimentConfig],
    "searcher.": [
        SingleSearcher,
        RandomSearcher,
        GridSearcher,
        AsyncHalvingSearcher,
        AdaptiveAshaSearcher,
        HyperbandSearcher,
        MedianStoppingSearcher,
        PbtSearcher,
    ],
    "searcher.limits.": [SearchLimits],
    "searcher.sampler.": [SamplerSection],
    "resources.": [Resources],
    "resources.slots_per_trial.": [SlotRange],
    "checkpoint_storage.": [DirectoryStorage, SharedFsStorage, S3Storage, UrlStorage],
    "reproducibility.": [Reproducibility],
    "environment.": [Environment],
    "profiling.": [Profiling],
    "idle.": [Idle],
    "interactive.": [Interactive],
    "log_policies.": [LogPolicy],
    "notify.": [Notify],
    "notify.thresholds.": [Threshold],
    "optimizations.": [Optimizations],
}
# What tells the variants of a section apart has no default that a user could leave to the code.
KINDS = {"searcher.name": "required", "checkpoint_storage.type": "null"}


def _default(field: Any) -> str:
    if field.is_required() or (field.default is None and field.annotation in (str, int)):
        return "required"
    if isinstance(field.default, SamplerSection):
        return json.dumps(field.default.name)
    if isinstance(field.default, BaseModel):
        return "all defaults"
    return json.dumps(field.default)


def _fields_of_the_code() -> set[tuple[str, str]]:
    return {
        (prefix + name, KINDS.get(prefix + name) or _default(field))
        for prefix, models in SECTIONS.items()
        for model in models
        for name, field in model.model_fields.items()
    }


def _fields_of_the_reference() -> set[tuple[str, str]]:
    rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", REFERENCE.read_text(), re.MULTILINE)
    known = {path for path, _ in _fields_of_the_code()}
    found = set()
    for path, rest in rows:
        cells = [cell.strip().strip("`") for cell in rest.split(" | ")]
        if path in known or "." in path:
            found.add((path, cells[-2]))
    return found


def test_the_reference_names_every_field_with_its_default() -> None:
    assert _fields_of_the_reference() == _fields_of_the_code()


def test_the_reference_names_every_refused_field() -> None:
    text = REFERENCE.read_text().partition("## Refused by name")[2]
    names = {name for fields in REFUSED_FIELDS.values() for name in fields} - {"container_path"}
    assert names <= set(re.findall(r"`(\w+)`", text))


def test_the_example_of_the_reference_is_valid() -> None:
    example, *_ = re.findall(r"```yaml\n(.*?)```", REFERENCE.read_text(), re.DOTALL)
    config = validate_config(parse_yaml(example))
    assert config.warnings == ()
    assert config.search_config().metric == "validation_loss"
