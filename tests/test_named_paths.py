"""Every module and name of Paceline that the README, the guides and the examples name is there."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted(path for path in (ROOT / "examples").rglob("*.py"))
REFERENCE = ROOT / "docs" / "reference.md"
PACKAGES = [
    *("client", "config", "core", "creators", "data", "declarative", "integrations", "journal"),
    *("plugins", "pytorch", "pytorch.deepspeed", "search", "storage", "testing", "train"),
]
_BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_DOTTED = re.compile(r"(?<![\w./-])paceline((?:\.[A-Za-z_]\w*)+)")
# Groups of entry points, and names in the systems of trackers.
_NO_MODULES = {
    *("executors", "samplers", "search_methods", "starters", "storages", "trackers"),
    *("checkpoint", "latest_checkpoint", "outcome", "error"),
}


def imported(code: str) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_in(path: Path) -> set[str]:
    text = path.read_text()
    blocks = [text] if path.suffix == ".py" else _BLOCKS.findall(text)
    found = {name for block in blocks for name in imported(block)}
    for dotted in _DOTTED.findall(text):
        if dotted.split(".")[1] not in _NO_MODULES:
            found.add(f"paceline{dotted}")
    return found


def is_there(name: str) -> bool:
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        module = ".".join(parts[:k])
        try:
            if find_spec(module) is None:
                continue
        except ModuleNotFoundError:
            continue
        held: object = import_module(module)
        for part in parts[k:]:
            # What a class has only in its objects cannot be seen here.
            if isinstance(held, type) or callable(held):
                return True
            if not hasattr(held, part):
                return False
            held = getattr(held, part)
        return True
    return False


@pytest.mark.parametrize("path", PAGES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_is_there(path: Path) -> None:
    assert [name for name in sorted(names_in(path)) if not is_there(name)] == []


@pytest.mark.parametrize("package", ["paceline", *(f"paceline.{name}" for name in PACKAGES)])
def test_a_package_offers_what_the_reference_names(package: str) -> None:
    module = import_module(package)
    offered = module.__all__
    _, _, section = REFERENCE.read_text().partition(f"\n## {package}\n")
    section, _, _ = section.partition("\n## ")
    assert offered == re.findall(r"^\| `(\w+)` \| \S", section, re.MULTILINE)
    assert [name for name in offered if not hasattr(module, name)] == []
    assert offered == sorted(offered, key=lambda n: (not n.isupper(), not n[0].isupper(), n))


def test_names_are_found() -> None:
    found = set().union(*map(names_in, PAGES + SCRIPTS))
    assert {"paceline.core.init", "paceline.pytorch.Trainer", "paceline.launch.deepspeed"} <= found
    assert len(found) > 40
    assert not is_there("paceline.core.nothing")
    assert not is_there("paceline.nothing")
