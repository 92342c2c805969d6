"""The user guide from start to end, in a browser."""

import re
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect


def trial_of(master: Any, experiment: int) -> Any:
    """Return an experiment's only trial."""
    (trial,) = master.client.get_experiment(experiment).trials()
    return trial


@pytest.mark.long
def test_an_experiment_is_created_watched_paused_and_continued(
    master: Any, open_page: Any, code: Path, write_config: Any, unfold: Any
) -> None:
    page = open_page(master)
    page.get_by_role("link", name="New experiment").click()
    write_config(
        page, "name: from the browser\nentrypoint: python3 train.py\nsearcher: {name: single}\n"
    )
    expect(page.get_by_text("The config is not valid yet")).to_be_visible()
    expect(page.get_by_role("button", name="Create and start")).to_be_disabled()
    write_config(
        page,
        f"""name: from the browser
entrypoint: python3 train.py
hyperparameters: {{learning_rate: 0.02}}
searcher: {{name: single, metric: test_loss}}
environment: {{working_dir: {code}}}
""",
    )
    expect(page.get_by_text("Valid. It would train 1 trial to the end.")).to_be_visible()
    page.get_by_role("button", name="Create and start").click()

    # Metrics appear by themselves.
    expect(page.get_by_role("heading", name="from the browser", level=1)).to_be_visible()
    expect(
        page.get_by_role("img", name=re.compile("Learning curves: test_loss: 1 line"))
    ).to_be_visible()
    experiment = int(page.url.rsplit("/", 1)[1])
    unfold(page, "More")
    page.get_by_role("link", name=re.compile("^Trial [0-9]+")).first.click()
    expect(page.get_by_role("img", name=re.compile("^loss: 2 lines"))).to_be_visible()
    unfold(page)
    page.get_by_role("combobox", name="X axis").click()
    page.get_by_role("option", name="epoch").click()
    expect(page).to_have_url(re.compile("x=epoch"))

    # So do the lines of the log.
    page.get_by_role("link", name="Logs").click()
    lines = page.get_by_role("log")
    batch = trial_of(master, experiment).data.steps_completed + 4
    expect(lines.get_by_text(f"batch {batch} is done", exact=True)).to_be_visible()

    # The cluster page tells who has the slot.
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Cluster").click()
    expect(page.get_by_role("listitem").filter(has_text="from the browser")).to_be_visible()

    # Pausing keeps what was trained, activating goes on from there.
    page.goto(f"/experiments/{experiment}")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Activate")).to_be_visible()
    heading = page.get_by_role("banner").or_(page.locator("header"))
    expect(heading.get_by_text("Paused")).to_be_visible()
    unfold(page, "More")
    expect(page.get_by_text("1 trial, 0 running")).to_be_visible()
    paused_at = trial_of(master, experiment).data.steps_completed
    page.get_by_role("button", name="Activate").click()
    expect(page.get_by_text("1 trial, 1 running")).to_be_visible()
    trial = trial_of(master, experiment).id
    page.goto(f"/trials/{trial}/logs")
    expect(page.get_by_text(f"goes on after batch {paused_at}", exact=True)).to_be_visible()
    (code / "finish").touch()
    expect(page.locator("header").get_by_text("Completed")).to_be_visible()
    page.get_by_role("link", name="Attempts 2").click()
    expect(page.get_by_role("row")).to_have_count(3)

    # Continuing an ended trial makes an experiment of its own.
    stopped_at = trial_of(master, experiment).data.steps_completed
    page.get_by_role("button", name="Continue trial").click()
    page.get_by_role("dialog").get_by_role("button", name="Continue").click()
    expect(page.get_by_text(f"continues trial {trial}", exact=True)).to_be_visible()
    continued = trial_of(master, int(page.url.rsplit("/", 1)[1]))
    page.goto(f"/trials/{continued.id}/logs")
    expect(page.get_by_text(f"goes on after batch {stopped_at}", exact=True)).to_be_visible()
    expect(page.locator("header").get_by_text("Completed")).to_be_visible()
    page.get_by_role("link", name="Checkpoints").click()
    expect(page.get_by_role("cell", name=str(stopped_at + 1), exact=True)).to_be_visible()
