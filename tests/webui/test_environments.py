"""What the attempts of a trial ran in, on the page of the trial."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

SCRIPT = """
import paceline
with paceline.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 1.0})
"""
GIT = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org")


@pytest.mark.long
def test_it_shows_the_interpreter_the_packages_and_the_changed_code_of_attempts(
    master: Any, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for arguments in (["init", "-b", "trunk"], ["add", "."], ["commit", "-m", "one"]):
        subprocess.run([*GIT, *arguments], cwd=tmp_path, check=True, capture_output=True)
    script.write_text(SCRIPT.replace("1.0", "0.25"))
    config = {
        "name": "recorded",
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "loss"},
    }
    experiment = master.client.create_experiment(config, tmp_path)
    assert experiment.wait(0.1).value == "COMPLETED"
    [trial] = experiment.trials()
    [recorded] = trial.environments()
    assert recorded.environment is not None
    page = open_page(master, f"/trials/{trial.id}/attempts")
    card = page.get_by_role("region", name="Environment of attempt 1")
    expect(card).to_contain_text(paceline.__version__)
    expect(card).to_contain_text(recorded.environment["python"]["executable"])
    expect(card).to_contain_text(f"commit {recorded.source['commit'][:10]} of trunk")
    added = card.get_by_text("+    context.train.report_validation_metrics(1, {")
    expect(added).to_be_hidden()
    card.get_by_text("Uncommitted changes").click()
    expect(added).to_be_visible()
    packages = recorded.environment["packages"]
    card.get_by_text(f"{len(packages)} packages").click()
    row = card.get_by_role("row").filter(has_text="pydantic-core")
    expect(row).to_contain_text(packages["pydantic-core"])
