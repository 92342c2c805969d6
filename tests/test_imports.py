"""Pins what imports load, and which package may import which."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import core

SOURCE = Path(paceline.__file__).parent
ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "pydantic", "httpx", "fastapi", "rich", "typer", "sqlalchemy", "yaml"}

# A package imports only those above it. The pure search methods import nothing, so that the config
# can turn its searcher into theirs.
ORDER = [
    "faults",
    "gpus",
    "journal",
    "storage",
    "search",
    "config",
    "messages",
    "core",
    "masterless_search",
    "display",
    "data",
    "workers",
    "engine",
    "pytorch",
    "train",
    "creators",
    "declarative",
    "launch",
    "testing",
    "integrations",
    "runner",
    "master",
    "client",
    "cli",
]
# The same within the engine, whose files are in folders.
ENGINE_ROOMS = [
    "tensors",
    "devices",
    "schedule",
    "parallel",
    "models",
    "formats",
    "loaders",
    "profiling",
    "state",
    "weights",
    "checkpoints",
    "gradients",
    "optimizer_steps",
    "metrics",
    "training",
    "passes",
    "batch_inference",
    "train_functions",
]
YAML_WITHOUT_READING = {"safe_dump", "Node", "MappingNode", "SequenceNode", "ScalarNode"}
FRONT_DOORS = {"pytorch", "train", "creators", "declarative"}
# The config objects become a trial class.
DOORS_BELOW = {"declarative": {"pytorch"}}


def loaded_by(run_python: Callable[..., Any], code: str) -> set[str]:
    result = run_python(f"import sys\n{code}\nprint(*sys.modules)")
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize(
    "code",
    [
        "import paceline",
        "import paceline.core",
        "import paceline.faults",
        "import paceline.gpus",
        "import paceline.storage",
        "import paceline.journal",
        "import paceline.display",
        "import paceline; paceline.get_cluster_info()",
        "import paceline\nwith paceline.core.init(): pass",
        "from paceline import core\ncore.DistributedContext.from_torch_distributed().close()",
    ],
)
def test_import_loads_nothing_heavy(run_python: Callable[..., Any], code: str) -> None:
    assert loaded_by(run_python, code) & HEAVY == set()


@pytest.mark.parametrize(
    "package",
    [
        "masterless_search",
        "data",
        "workers",
        "workers.runs",
        "train",
        "launch",
        "runner",
        "master",
        "client",
        "cli",
    ],
)
def test_programs_load_no_torch(run_python: Callable[..., Any], package: str) -> None:
    result = run_python(f"import sys, paceline.{package}; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    # Only `train.search` searches, and only the driver that calls it.
    late = {"torch"} | ({"paceline.search"} if package == "train" else set())
    assert late & {*result.stdout.split()} == set()


def test_import_of_the_package_alone_loads_none_of_its_parts(
    run_python: Callable[..., Any],
) -> None:
    result = run_python("import sys, paceline; print(*sys.modules)")
    loaded = [name for name in result.stdout.split() if name.startswith("paceline.")]
    assert loaded == []


def imports_of(package: str) -> Iterator[tuple[Path, str]]:
    """Yield every module that the files of a package import from Paceline."""
    for path in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            yield from ((path, name) for name in names if name.startswith("paceline."))


@pytest.mark.parametrize("package", ORDER)
def test_package_imports_only_those_above_it(package: str) -> None:
    allowed = set(ORDER[: ORDER.index(package) + 1])
    if package in FRONT_DOORS:
        allowed -= FRONT_DOORS - {package} - DOORS_BELOW.get(package, set())
    wrong = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path, name in imports_of(package)
        if name.split(".")[1] in ORDER and name.split(".")[1] not in allowed
    ]
    assert wrong == []


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages <= set(ORDER)
    rooms = {path.parent.name for path in SOURCE.glob("engine/*/__init__.py")}
    assert rooms == set(ENGINE_ROOMS)


@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_room_of_the_engine_imports_only_those_above_it(room: str) -> None:
    allowed = ENGINE_ROOMS[: ENGINE_ROOMS.index(room) + 1]
    wrong = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path, name in imports_of(f"engine/{room}")
        if name.startswith("paceline.engine.") and name.split(".")[2] not in allowed
    ]
    assert wrong == []


def test_the_architecture_page_has_the_same_order_and_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("|---|---|")[2].partition("\n\n")[0]
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        name for name in ORDER if name in packages
    ]
    rooms = text.partition("## Rooms of the engine")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", rooms, re.MULTILINE) == ENGINE_ROOMS
    names = re.findall(r"`(\w+/[\w/.]*)`", text)
    assert len(names) > 30
    wrong = [name for name in names if not any((at / name).exists() for at in (SOURCE, ROOT))]
    inner = [name for name in wrong if not list(SOURCE.glob(f"*/{name}"))]
    assert inner == []
    alone = re.findall(r"`(_\w+\.py)`", text)
    assert [name for name in alone if not list(SOURCE.rglob(name))] == []


def test_parts_resolve_lazily() -> None:
    import paceline as det

    assert det.core is core
    assert det.InvalidHP is core.InvalidHP
    assert det.get_cluster_info is core.get_cluster_info
    assert det.LOG_FORMAT == "%(levelname)s: [%(process)s] %(name)s: %(message)s"
    assert det.__version__[0].isdigit()


def test_unknown_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018


@pytest.mark.parametrize("package", ["core", "data", "display", "journal", "storage"])
def test_exported_names_are_sorted_and_exist(package: str) -> None:
    module = getattr(__import__(f"paceline.{package}"), package)
    names = module.__all__
    order = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert names == order
    assert [name for name in names if not hasattr(module, name)] == []


def test_one_module_alone_reads_yaml() -> None:
    """Others call it, as it limits what aliases may expand to; anybody may write YAML."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "yaml":
                found |= {(path.name, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(path.name, a.name) for a in node.names if a.name == "yaml" and a.asname}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml":
                found.add((path.name, node.attr))
    readers = {name for name, used in found if used not in YAML_WITHOUT_READING}
    assert readers == {"_read_yaml.py"}


def test_no_package_imports_private_modules_of_another() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                parts = node.module.split(".")
                is_private = any(part.startswith("_") for part in parts[2:])
                if parts[0] == "paceline" and is_private and parts[1] != own:
                    found.append(f"{path.name}: {node.module}")
    assert found == []
