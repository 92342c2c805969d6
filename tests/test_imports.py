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
HEAVY = {"torch", "numpy", "pydantic", "httpx2", "fastapi", "rich", "typer", "sqlalchemy", "yaml"}

# From the ground up: a room imports only rooms above it in this list.
ORDER = [
    "faults",
    "_base",
    "journal",
    "storage",
    "search",
    "config",
    "data",
    "core",
    "_training.workers",
    "_training",
    "_training.engine",
    "pytorch",
    "train",
    "creators",
    "declarative",
    "launch",
    "testing",
    "integrations",
    "importers",
    "_cluster.messages",
    "_cluster.runner",
    "_cluster.master",
    "plugins",
    "client",
    "cli",
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
        "import paceline._base.gpus",
        "import paceline.storage",
        "import paceline.journal",
        "import paceline._training",
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
        "_training.masterless_search",
        "_base.progress_display",
        "_training.workers.process_pools",
        "_training.workers.workers",
        "data",
        "train",
        "train._run_protocol",
        "launch.torch_distributed",
        "_cluster.runner.node_runner",
        "_cluster.runner.attempt_run",
        "_cluster.master.server",
        "client",
        "cli._app",
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


def room_of(path: str) -> str:
    """Return the room in ORDER that holds a module, which is named without `paceline.`."""
    parts = path.split(".")
    return next((name for k in (2, 1) if (name := ".".join(parts[:k])) in ORDER), parts[0])


def imports_of(room: str) -> Iterator[tuple[Path, str]]:
    """Yield every module that the files of a room import from Paceline, without `paceline.`."""
    for path in sorted(SOURCE.rglob("*.py")):
        if room_of(".".join(path.relative_to(SOURCE).with_suffix("").parts)) != room:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                if name.startswith("paceline."):
                    yield path, name.removeprefix("paceline.")


@pytest.mark.parametrize("room", ORDER)
def test_room_imports_only_those_above_it(room: str) -> None:
    allowed = set(ORDER[: ORDER.index(room) + 1])
    if room in FRONT_DOORS:
        allowed -= FRONT_DOORS - {room} - DOORS_BELOW.get(room, set())
    wrong = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path, name in imports_of(room)
        if room_of(name) in ORDER and room_of(name) not in allowed
    ]
    assert wrong == []


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages - {"_cluster"} <= set(ORDER)


def test_the_architecture_page_has_the_same_rooms_and_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("|---|---|")[2].partition("\n\n")[0]
    rooms = re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE)
    assert [room.replace("/", ".") for room in reversed(rooms)] == ORDER
    # The web UI is there once it is built.
    names = set(re.findall(r"`(\w+/[\w/.]*)`", text)) - {"src/paceline/_cluster/master/webui/"}
    assert len(names) > 30
    wrong = [name for name in names if not any((at / name).exists() for at in (SOURCE, ROOT))]
    assert [name for name in wrong if not list(SOURCE.glob(f"**/{name}"))] == []
    alone = re.findall(r"`(\w+\.py)`", text)
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
