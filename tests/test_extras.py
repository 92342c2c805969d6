"""Pins that extras install what the package uses, and that texts name extras that exist."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
# They serve people and tests, not the package.
FOR_OTHERS = {"dev", "docs", "examples", "test"}
# Functions that are given the name of a module.
FINDERS = {"find_spec", "import_module", "required_library"}
# Packages whose module has another name.
MODULES = {
    "argon2_cffi": "argon2",
    "mlflow_skinny": "mlflow",
    "google_re2": "re2",
    "graphql_core": "graphql",
    "nvidia_ml_py": "pynvml",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
# What somebody brings who uses it; pydantic pins its own core.
BROUGHT = {"accelerate", "boto3", "deepspeed", "horovod", "ignite", "lightning", "transformers"}
BROUGHT |= {"pydantic_core"}
# It loads the module that imports it.
BROUGHT |= {"pytest"}


def project() -> dict[str, Any]:
    try:
        toml: Any = import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10; pytest brings tomli there
        toml = import_module("tomli")
    table: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


EXTRAS: dict[str, list[str]] = project()["optional-dependencies"]


def modules_of(requirements: list[str]) -> list[str]:
    """Return the modules that requirements install."""
    names = [re.split(r"[\[<>=!~; ]", line)[0].replace("-", "_") for line in requirements]
    return [MODULES.get(name, name) for name in names]


def names_in(path: Path) -> Iterator[str]:
    """Yield the parts of every module that a file imports, or looks for by name."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    by_name = any(isinstance(node, ast.Name) and node.id in FINDERS for node in nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split(".")


@pytest.fixture(scope="module")
def used() -> set[str]:
    return {name for path in SOURCE.rglob("*.py") for name in names_in(path)}


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - FOR_OTHERS))
def test_every_package_of_an_extra_is_used(extra: str, used: set[str]) -> None:
    modules = modules_of(EXTRAS[extra])
    assert modules
    assert [name for name in modules if name not in used] == []


def test_every_package_that_is_imported_is_declared() -> None:
    """What comes with another package may stay away in its next release."""
    imported = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
    declared = modules_of(project()["dependencies"])
    for extra in EXTRAS.keys() - FOR_OTHERS:
        declared += modules_of(EXTRAS[extra])
    known = {"paceline", *sys.stdlib_module_names, *BROUGHT, *declared}
    assert sorted(imported - known) == []


def texts() -> Iterator[Path]:
    yield from (ROOT / "Makefile", *ROOT.glob("*.md"))
    for directory in ("docs", "examples", "benchmarks", "src"):
        for suffix in ("md", "py", "ipynb", "sh", "yaml"):
            yield from (ROOT / directory).rglob(f"*.{suffix}")


def test_texts_name_extras_that_exist() -> None:
    named = [
        (str(path.relative_to(ROOT)), extra)
        for path in texts()
        for names in re.findall(r"(?:\bpaceline|['\" ]\.)\[([a-z0-9,_-]+)\]", path.read_text())
        for extra in names.split(",")
    ]
    assert {"ray", "examples", "dev"} <= {extra for _, extra in named}
    assert [(path, extra) for path, extra in named if extra not in EXTRAS] == []
