"""Commands that need no master: previews, examples, the version."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline.cli._app import examples_directory


def test_version_is_that_of_the_package(paceline: Any) -> None:
    assert paceline("version").stdout == paceline("--version").stdout == f"{version('paceline')}\n"


def test_an_example_is_copied_once(paceline: Any, tmp_path: Path) -> None:
    assert "core_api_digits" in paceline("examples", "list").stdout.splitlines()
    paceline("examples", "copy", "core_api_digits", cwd=tmp_path)
    copied = {path.name for path in (tmp_path / "core_api_digits").iterdir()}
    assert {"README.md", "adaptive.yaml", "model_def_adaptive.py"} <= copied
    assert not copied & {"__pycache__", "paceline_runs"}
    again = paceline("examples", "copy", "core_api_digits", cwd=tmp_path, code=1)
    assert "must be a new or empty directory" in again.stderr
    paceline("examples", "copy", "core_api_digits", tmp_path / "other")
    assert (tmp_path / "other" / "README.md").exists()


def test_an_unknown_example_lists_the_known_ones(paceline: Any) -> None:
    assert "core_api_digits" in paceline("examples", "copy", "nothing", code=1).stderr


def test_a_config_whose_aliases_expand_without_bound_is_refused(
    paceline: Any, tmp_path: Path
) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, 9)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    refused = paceline("e", "create", "bomb.yaml", cwd=tmp_path, code=1)
    assert "bomb.yaml:6` must hold at most 200,000 values" in refused.stderr.replace("\n", "")


def test_preview_shows_trials_lengths_and_brackets(paceline: Any) -> None:
    config = examples_directory() / "core_api_digits" / "adaptive.yaml"
    shown = json.loads(paceline("preview-search", config, "--json").stdout)
    assert (shown["searcher"], shown["unit"]) == ("adaptive_asha", "epochs")
    assert sum(row["num_trials"] for row in shown["rows"]) == 16
    assert sum(bracket["num_trials"] for bracket in shown["brackets"]) == 16
    text = paceline("preview-search", config).stdout
    total = sum(row["num_trials"] * row["length"] for row in shown["rows"])
    assert f"In total {total} epochs." in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "searcher.max_trials=0"], "`searcher.max_trials`"),
        (["--config", "hyperparameters.dropout.minval=2"], "`hyperparameters.dropout"),
        (["--config", "nonsense"], "`--config` must name a field and its value"),
    ],
)
def test_a_wrong_config_is_one_line_per_problem(
    paceline: Any, options: list[str], message: str
) -> None:
    config = examples_directory() / "core_api_digits" / "adaptive.yaml"
    result = paceline("preview-search", config, *options, code=1)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_files_of_a_run_are_listed_and_copied(
    paceline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with core.init(name="media") as context:
        context.train.report_html(1, "val/page", "<p>one</p>")
        context.train.report_html(1, "other", "<p>two</p>")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (context.run_dir / "files" / "link").symlink_to(secret)
    listed = json.loads(paceline("runs", "files", "last", "--json").stdout)
    assert [one["path"].rpartition("-")[0] for one in listed] == [
        "media/other/1-0", "media/val/page/1-0",
    ]  # fmt: skip
    assert {one["size"] for one in listed} == {len("<p>one</p>")}
    paceline("runs", "download", "last", "media/val/", "-o", "copies")
    [copy] = [path for path in (tmp_path / "copies").rglob("*") if path.is_file()]
    assert copy.read_text() == "<p>one</p>"
    copied = json.loads(paceline("runs", "download", "last", "--json").stdout)
    assert copied == {"path": "files", "files": [one["path"] for one in listed]}
    wrong = paceline("runs", "download", "last", "link", code=1)
    assert "`PATH` must be a file or directory of the run, but got 'link'" in wrong.stderr
