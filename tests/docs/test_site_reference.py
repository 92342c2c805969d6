"""The reference has everything that it is to have, or its build fails."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="NOT TESTED: the reference needs griffe, of Python 3.11")

import site_names
import site_tables
from site_pages import SiteError

from paceline.cli._command_groups import command_examples

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paceline"


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return site_names.NamePages().texts()


def entry(texts: dict[str, str], path: str) -> str:
    """Return the entry of a name, without those of its members."""
    package, _, name = path.rpartition(".")
    _, _, rest = texts[f"reference/{package}.md"].partition(f"\n## `{name}` {{ #{path} }}\n")
    return re.split(r"^##", rest, flags=re.MULTILINE)[0]


def test_every_public_name_has_an_entry(texts: dict[str, str]) -> None:
    packages = [place.removeprefix("reference/").removesuffix(".md") for place in texts]
    assert {"paceline", "paceline.core", "paceline.pytorch.deepspeed", "paceline.data"} <= {
        *packages
    }
    num_names = 0
    for package in packages:
        for name in import_module(package).__all__:
            num_names += 1
            path = f"{package}.{name}".replace("__", "")
            anchors = re.findall(
                rf"^## `{name}` {{ #{re.escape(path)} }}$",
                texts[f"reference/{package}.md"],
                re.MULTILINE,
            )
            assert len(anchors) == 1, path
    assert num_names > 300


def test_an_entry_has_signature_sections_and_members(texts: dict[str, str]) -> None:
    function = entry(texts, "paceline.train.prepare_model")
    assert (
        "prepare_model(\n    model: torch.nn.Module,\n    *,\n    move_to_device: bool = True,"
        in function
    )
    assert "**Arguments**\n\n- `model`: The model.\n" in function
    assert "**Raises**\n\n- `TypeError`: " in function
    page = texts["reference/paceline.train.md"]
    assert "### `run_iterator` { #paceline.train.Trainer.run_iterator }" in page
    # A subclass names what it has from a public base.
    subclass = entry(texts, "paceline.pytorch.deepspeed.Trainer")
    base = re.escape("From [`Trainer`](paceline.pytorch.md#paceline.pytorch.Trainer): ")
    assert re.search(rf"^{base}.*`fit`, `train_for`, ", subclass, re.MULTILINE)
    # A second way to a name leads to its entry.
    again = entry(texts, "paceline.plugins.Tracker")
    assert "See [`paceline.core.Tracker`](paceline.core.md#paceline.core.Tracker)." in again


@pytest.mark.long
def test_names_without_docstring_or_line_in_the_index_fail(tmp_path: Path) -> None:
    """One copy of the source with one fault of each kind: reading it takes seconds."""
    ignored = shutil.ignore_patterns("__pycache__", "webui", "docs")
    copy = tmp_path / "paceline"
    shutil.copytree(SOURCE, copy, ignore=ignored)
    for name, before, after in [
        ("data/__init__.py", r"__all__ = \[", '__all__ = [\n    "Forgotten",'),
        ("core/_core_context.py", r'(\nclass Context:\n    )""".*?"""', r"\1"),
        ("client/_experiment_and_trial.py", r'(    def pause.*?\n        )""".*?"""', r"\1"),
    ]:
        path = copy / name
        text, num_found = re.subn(before, after, path.read_text(), count=1, flags=re.DOTALL)
        assert num_found == 1
        path.write_text(text)
    with pytest.raises(SiteError) as caught:
        site_names.NamePages(tmp_path).texts()
    faults = [re.sub(r" \(.*:\d+\)", "", fault) for fault in str(caught.value).splitlines()]
    assert sorted(faults) == [
        "paceline.client.Experiment.pause: the member has no docstring.",
        "paceline.core.Context: the name has no docstring.",
        "paceline.data.Forgotten: the name is missing in reference.md.",
    ]


@pytest.mark.long
def test_a_name_that_is_gone_fails(tmp_path: Path) -> None:
    index = tmp_path / "reference.md"
    text = (ROOT / "docs" / "reference.md").read_text()
    text = text.replace(
        "| `launched_place` |", "| `gone` | No longer there |\n| `launched_place` |", 1
    )
    index.write_text(text)
    with pytest.raises(
        SiteError, match=r"^paceline\.core\.gone: the name is missing in `__all__`\.$"
    ):
        site_names.NamePages(ROOT / "src", index).texts()


def test_every_command_has_its_help_and_options() -> None:
    page = site_tables.commands_page()
    help_of = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "e", "create", "--help"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    _, _, section = page.partition("\n### paceline experiment create\n")
    section = section.partition("\n##")[0]
    options = {*re.findall(r"--[a-z-]+", help_of)} - {"--help"}
    assert options
    assert [option for option in options if option not in section] == []
    assert "\n### paceline e create" not in page
    assert "\npaceline e create config.yaml -f\n" in section
    shown = [line for line in page.splitlines() if line.startswith("paceline ")]
    for name, examples in command_examples().items():
        assert all(f"paceline {example}" in shown for example in examples), f"{name}"


def test_every_field_and_route_is_shown() -> None:
    from paceline._cluster.master.api.application import describe
    from paceline.config import json_schema

    fields = site_tables.config_page()
    schema = json_schema()
    for model in [schema, *schema["$defs"].values()]:
        for name in model.get("properties", ()):
            assert f"| `{name}` | " in fields
    routes = site_tables.routes_page(describe())
    for path, methods in describe()["paths"].items():
        for method in methods:
            assert f"### {method.upper()} `{path}` {{" in routes
    assert "Scope: `submit`." in routes
    models = site_tables.models_page(describe())
    assert all(f"\n## {name}\n" in models for name in describe()["components"]["schemas"])


def test_a_variable_without_text_fails(tmp_path: Path) -> None:
    page = site_tables.variables_page()
    for name in site_tables.variables_in(SOURCE):
        assert name in page
    assert page.count("| `PACELINE_HOME` |") == 1
    (tmp_path / "module.py").write_text('os.environ["PACELINE_NEW_ONE"]\n')
    with pytest.raises(SiteError, match=r"^PACELINE_NEW_ONE: the variable has no text\."):
        site_tables.variables_page(tmp_path)
