"""Pages of what has very many parts: they draw what is in sight, and say what they leave out."""

from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

MANY_METRICS = """
import paceline

with paceline.core.init() as context:
    for step in (1, 2):
        metrics = {f"layer{i:05}/norm": i / step for i in range(12_000)}
        context.train.report_validation_metrics(step, {"test_loss": 1 / step, **metrics})
"""


def test_only_charts_in_sight_are_drawn_of_12000_metrics(
    master: Any, open_page: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(MANY_METRICS)
    experiment = master.create(tmp_path, name="wide")
    assert experiment.wait(0.1).value == "COMPLETED"
    (trial,) = experiment.trials()
    page = open_page(master, f"/trials/{trial.id}")
    expect(page.get_by_text("12,001 charts", exact=True)).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible()
    assert page.locator("canvas").count() < 20
    # A name far behind those that the trial's summary has.
    page.get_by_role("textbox", name="Filter the metrics").fill("layer11 987/norm")
    expect(page.get_by_text("1 of 12,001 charts", exact=True)).to_be_visible()
    expect(page.get_by_role("img", name="layer11987/norm: 1 lines")).to_be_visible()
    page.reload()
    expect(page.get_by_role("textbox", name="Filter the metrics")).to_have_value("layer11 987/norm")
    page.get_by_role("textbox", name="Filter the metrics").fill("")
    expect(page.get_by_text("12,001 charts", exact=True)).to_be_visible()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight / 2)")
    expect(page.get_by_role("region", name="layer05").first).to_be_visible()
    assert page.locator("canvas").count() < 20


OWN_METRIC = """
import paceline

with paceline.core.init() as context:
    name = paceline.get_cluster_info().trial.hparams["name"]
    for step in (1, 2):
        context.train.report_validation_metrics(step, {name: 1 / step})
"""


def test_compare_says_what_is_not_drawn_and_offers_trials_from_lists(
    master: Any, open_page: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(OWN_METRIC)
    trials = []
    for name in ("test_loss", "test_error"):
        experiment = master.create(
            tmp_path, name=f"of {name}", hyperparameters={"name": name, "number": 1_648_771_200}
        )
        assert experiment.wait(0.1).value == "COMPLETED"
        trials.append(experiment.trials()[0].id)
    first, second = trials
    page = open_page(master, "/compare")
    for name in ("of test_loss", "of test_error"):
        page.get_by_role("combobox", name="Experiment").fill(name)
        page.get_by_role("option", name=name).click()
        page.get_by_role("combobox", name="Its trials").click()
        page.get_by_role("option", name="Trial").first.click()
        page.keyboard.press("Escape")
    expect(page.get_by_role("img", name="test_loss: 1 lines")).to_be_visible()
    note = page.get_by_text("1 of 2 trials are drawn. No points of test_loss (validation)")
    expect(note).to_contain_text(f"trial {second}.")
    page.get_by_role("switch", name="Show what is the same too").click()
    expect(page.get_by_role("cell", name="1,648,771,200")).to_have_count(2)
    # More than the page compares: it says so, and forgets none.
    many = [first, *range(900_000, 900_055)]
    page.goto(f"/compare?trials={many}".replace(" ", ""))
    expect(page.get_by_text("The first 50 of 56 chosen trials are compared.")).to_be_visible()


def test_all_of_a_list_longer_than_a_page_are_selected(
    master: Any, open_page: Any, tmp_path: Path
) -> None:
    made = []
    for number in range(205):
        config = {
            "name": f"long list {number}", "entrypoint": "true", "hyperparameters": {},
            "searcher": {"name": "single", "metric": "test_loss"},
            "environment": {"working_dir": str(tmp_path)},
        }  # fmt: skip
        made.append(master.client.create_experiment(config, activate=False))
    page = open_page(master, "/experiments?q=long+list")
    expect(page.get_by_role("status").filter(has_text="205 experiments")).to_be_visible()
    page.get_by_role("checkbox", name="Select all rows").click()
    expect(page.get_by_text("205 experiments, 200 selected")).to_be_visible()
    page.get_by_role("button", name="Select all 205").click()
    expect(page.get_by_text("205 experiments, 205 selected")).to_be_visible()
    page.get_by_role("button", name="With 205 selected experiments").click()
    page.get_by_role("menuitem", name="Kill 205").click()
    page.get_by_role("button", name="Kill them").click()
    expect(page.get_by_role("button", name="With 205 selected experiments")).to_have_count(0)
    # All of them have ended when the list is read: a busy machine takes a while.
    for experiment in made:
        experiment.wait()
    page.goto("/experiments?q=long+list&state=CANCELED")
    expect(page.get_by_role("status").filter(has_text="205 experiments")).to_be_visible()
