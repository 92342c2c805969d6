"""Pages of what has very many parts: they draw what is in sight, and say what they leave out."""

import re
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


@pytest.mark.long
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


SEEDS = """
import paceline

with paceline.core.init() as context:
    hparams = paceline.get_cluster_info().trial.hparams
    for step in range(1, 6):
        loss = hparams["lr"] / step + hparams["seed"] / 100
        metrics = {f"layer{i}/norm": loss * i for i in range(60)}
        context.train.report_validation_metrics(step, {"test_loss": loss, **metrics})
"""


@pytest.mark.long
def test_compare_says_what_is_not_drawn_and_finds_runs_by_their_experiments(
    master: Any, open_page: Any, tmp_path: Path, unfold: Any
) -> None:
    (tmp_path / "train.py").write_text(OWN_METRIC)
    trials = []
    for name in ("test_loss", "test_error"):
        experiment = master.create(
            tmp_path, name=f"of {name}", hyperparameters={"name": name, "number": 1_648_771_200}
        )
        assert experiment.wait(0.1).value == "COMPLETED"
        trials.append(experiment.trials()[0].id)
    page = open_page(master, "/compare")
    unfold(page, "Choose runs")
    page.get_by_role("combobox", name="Search runs").fill("of test_")
    expect(page.get_by_text("2 of 2 runs shown")).to_be_visible()
    expect(page.get_by_role("img", name="test_loss: 1 lines")).to_be_visible()
    expect(page.get_by_text("1 of 2 drawn. No points of of test_error")).to_be_visible()
    page.get_by_text("What differs", exact=True).click()
    page.get_by_role("switch", name="Show what is the same too").click()
    expect(page.get_by_role("cell", name="1,648,771,200")).to_have_count(2)
    # A link may name runs that are gone: it says so, and shows the others.
    many = [*trials, *range(900_000, 900_012)]
    page.goto(f"/compare?trials={many}".replace(" ", ""))
    expect(page.get_by_text("2 of 2 runs shown")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("900009 and 2 more")


@pytest.mark.long
def test_a_workspace_draws_groups_and_keeps_its_view_in_the_address(
    master: Any, open_page: Any, tmp_path: Path, scroll_to: Any, unfold: Any
) -> None:
    (tmp_path / "train.py").write_text(SEEDS)
    hparams = {
        name: {"type": "categorical", "vals": values}
        for name, values in (("lr", [0.1, 0.2]), ("seed", [0, 1, 2]))
    }
    searcher = {"name": "grid", "metric": "test_loss"}
    experiment = master.create(tmp_path, name="seeds", hyperparameters=hparams, searcher=searcher)
    assert experiment.wait(0.1).value == "COMPLETED"
    page = open_page(master, f"/experiments/{experiment.id}/trials")
    page.get_by_role("button", name="Compare all trials").click()
    unfold(page, "Choose runs")
    unfold(page)
    runs = page.get_by_role("region", name="List of runs")
    for name in ("lr 0.1, seed 0", "lr 0.2, seed 2"):
        expect(runs.get_by_role("link", name=name)).to_be_visible()
    expect(page.get_by_role("img", name="test_loss: 6 lines")).to_be_visible()
    # Of 61 metrics only those in sight are drawn.
    expect(page.get_by_text("61 charts", exact=True)).to_be_visible()
    assert page.locator("canvas").count() < 25
    page.get_by_role("checkbox", name="Show lr 0.1, seed 0").uncheck()
    expect(page.get_by_role("img", name="test_loss: 5 lines")).to_be_visible()
    page.get_by_role("checkbox", name="Show lr 0.1, seed 0").check()

    chart = page.get_by_role("img", name="test_loss: 6 lines")
    chart.scroll_into_view_if_needed()
    # All six lines are told at this place, in the other panels, too.
    expect(page.get_by_role("img", name=re.compile(": 6 lines")).nth(1)).to_be_attached()
    chart.hover()
    expect(page.get_by_role("region", name="Comparison").locator("strong").nth(11)).to_be_visible()
    page.mouse.move(5, 5)

    page.get_by_role("textbox", name="Filter the metrics").fill("layer1*/norm|loss")
    expect(page.get_by_text("12 of 61 charts", exact=True)).to_be_visible()
    page.get_by_role("textbox", name="Filter the metrics").fill("layer13/")
    page.get_by_role("button", name="Hide layer13/norm").click()
    expect(page.get_by_role("button", name="Show 1 hidden panel")).to_be_visible()
    page.get_by_role("textbox", name="Filter the metrics").fill("layer12/|loss")
    pin = page.get_by_role("button", name="Pin layer12/norm")
    scroll_to(pin)
    pin.click()
    expect(page.get_by_role("button", name="Pinned 1 panel")).to_be_visible()
    options = page.get_by_role("button", name="Options of lr 0.2, seed 1")
    for _ in range(2):
        options.press("Enter")
        menu = page.get_by_role("menu", name="Options of lr 0.2, seed 1")
        expect(menu.get_by_role("menuitem").first).to_be_focused()
        page.keyboard.press("Escape")
        expect(options).to_be_focused()
    expect(page.get_by_role("menu")).to_have_count(0)
    options.click()
    expect(menu.get_by_role("menuitem").first).to_be_focused()
    options.click()
    expect(page.get_by_role("menu")).to_have_count(0)
    options.click()
    page.get_by_role("menuitem", name="Use as baseline").click()
    expect(runs.get_by_role("listitem").first).to_contain_text("lr 0.2, seed 1 baseline")

    page.get_by_role("combobox", name="Group by").click()
    page.get_by_role("option", name="Everything but the seed").click()
    page.keyboard.press("Escape")
    expect(page.get_by_text("2 of 2 groups shown")).to_be_visible()
    chart = page.get_by_role("img", name="test_loss: 2 lines")
    scroll_to(chart)
    expect(chart).to_be_visible()
    # High enough that a phone, too, has both in sight.
    page.set_viewport_size({"width": page.viewport_size["width"], "height": 1800})
    with page.expect_request("**/api/v1/metric-groups") as sent:
        page.reload()
    # All panels in sight share a request.
    assert len(sent.value.post_data_json["metrics"]) == 2
    scroll_to(chart)
    expect(chart).to_be_visible()
    unfold(page, "Choose runs")
    expect(runs.get_by_role("listitem").filter(has_text="lr 0.2")).to_contain_text("3 runs")
    expect(page.get_by_role("button", name="Show 1 hidden panel")).to_be_visible()
    expect(page.get_by_role("button", name="Pinned 1 panel")).to_be_visible()


@pytest.mark.long
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
    page.get_by_role("button", name="Select all 205 that match").click()
    expect(page.get_by_text("205 experiments, 205 selected")).to_be_visible()
    page.get_by_role("button", name="With 205 selected experiments").click()
    page.get_by_role("menuitem", name="Label …").click()
    dialog = page.get_by_role("dialog", name="Label experiments?")
    dialog.get_by_role("combobox", name="Add labels").fill("all of them")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Label 205 experiments?")
    dialog.get_by_role("button", name="Label them").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    # Those that were not loaded have it as well.
    page.goto("/experiments?q=tag:%22all+of+them%22")
    expect(page.get_by_role("status").filter(has_text="205 experiments")).to_be_visible()
    page.get_by_role("checkbox", name="Select all rows").click()
    page.get_by_role("button", name="Select all 205 that match").click()
    page.get_by_role("button", name="With 205 selected experiments").click()
    page.get_by_role("menuitem", name="Kill …").click()
    dialog = page.get_by_role("dialog", name="Kill 205 experiments?")
    expect(dialog).to_contain_text("and 155 more")
    dialog.get_by_role("button", name="Kill them").click()
    expect(page.get_by_role("button", name="With 205 selected experiments")).to_have_count(0)
    # All of them have ended when the list is read: a busy machine takes a while.
    for experiment in made:
        experiment.wait()
    page.goto("/experiments?q=long+list&state=CANCELED")
    expect(page.get_by_role("status").filter(has_text="205 experiments")).to_be_visible()
