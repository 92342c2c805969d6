"""What people do with experiments: find, edit, fork, archive, delete; and reading logs."""

import re
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

FAILING = """
import sys

import paceline

with paceline.core.init() as context:
    rate = paceline.get_cluster_info().trial.hparams["rate"]
    context.train.report_validation_metrics(1, {"test_loss": rate})
    print("all is well", flush=True)
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "state.txt").write_text("state")
    if rate == 3:
        raise ValueError("no such data set")
"""


def ended(master: Any, directory: Path, *rates: int, name: str) -> list[Any]:
    """Return ended experiments with these rates, of which that with a rate of 3 failed."""
    (directory / "train.py").write_text(FAILING)
    experiments = [
        master.create(
            directory,
            name=f"{name} {rate}",
            hyperparameters={"rate": rate, "is_odd": rate % 2 == 1},
        )
        for rate in rates
    ]
    for one in experiments:
        one.wait(0.1)
    return experiments


# Not for the module: its tests need not run one after the other.
@pytest.fixture(scope="session")
def found(master: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return three ended experiments: with rates of 1, 2 and 3, the last of which failed."""
    return ended(master, tmp_path_factory.mktemp("code"), 1, 2, 3, name="rate")


@pytest.mark.long
def test_experiments_are_filtered_by_values_and_their_columns_ordered(
    master: Any, open_page: Any, found: list[Any]
) -> None:
    page = open_page(master, "/experiments?q=rate")
    names = page.get_by_role("table").get_by_role("link")
    expect(names).to_have_text(["rate 3", "rate 2", "rate 1"])
    page.get_by_role("button", name="Filter", exact=True).click()
    page.get_by_role("combobox", name="Comparison").click()
    page.get_by_role("option", name="<=").click()
    page.get_by_role("textbox", name="Value").fill("2")
    page.get_by_role("button", name="Add the filter").click()
    expect(names).to_have_text(["rate 2", "rate 1"])
    page.get_by_role("combobox", name="Column", exact=True).fill("is_odd")
    page.get_by_role("option", name="is_odd", exact=True).click()
    page.get_by_role("combobox", name="Comparison").click()
    page.get_by_role("option", name="=", exact=True).click()
    page.get_by_role("textbox", name="Value").fill("true")
    page.get_by_role("textbox", name="Value").press("Enter")
    expect(names).to_have_text(["rate 1"])
    # The address is the view.
    page.reload()
    expect(names).to_have_text(["rate 1"])
    page.get_by_role("button", name="Remove the filter Best <= 2").click()
    expect(names).to_have_text(["rate 3", "rate 1"])

    page.goto("/experiments?q=rate&columns=%5B%22hparam%3Arate%22%2C%22hparam%3Ais_odd%22%5D")
    expect(page.get_by_role("cell", name=re.compile("^(true|false)$"))).to_have_count(3)
    page.get_by_role("button", name="Order").click()
    page.get_by_role("button", name="Move is_odd to the left").click()
    titles = page.get_by_role("columnheader").filter(has_text=re.compile("^(rate|is_odd)$"))
    expect(titles).to_have_text(["is_odd", "rate"])


@pytest.mark.long
def test_an_experiment_is_edited_forked_archived_and_deleted(
    master: Any, open_page: Any, tmp_path: Path
) -> None:
    kept, deleted = ended(master, tmp_path, 1, 2, name="own")
    page = open_page(master, f"/experiments/{kept.id}")

    def choose(action: str) -> None:
        page.get_by_role("button", name="More actions").click()
        page.get_by_role("menuitem", name=action, exact=True).click()

    choose("Edit name and labels")
    page.get_by_role("textbox", name="Name").fill("renamed")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="renamed", level=1)).to_be_visible()

    choose("Fork")
    expect(page.get_by_role("heading", name=f"Fork experiment {kept.id}")).to_be_visible()
    page.get_by_role("switch", name="Do not start yet").click()
    page.get_by_role("button", name="Create, paused").click()
    expect(page.locator("header").get_by_text("Paused")).to_be_visible()
    fork = master.client.get_experiment(int(page.url.rsplit("/", 1)[1]))
    assert fork.config["hyperparameters"]["rate"] == 1
    choose("Kill")
    expect(page.get_by_role("dialog")).to_contain_text("No trial runs now")
    page.get_by_role("button", name="Kill it").click()
    expect(page.locator("header").get_by_text("Canceled")).to_be_visible()
    choose("Archive")
    expect(page.get_by_text("Archived", exact=True)).to_be_visible()

    # Keeping it is a choice too; what would go is told before.
    page.goto(f"/experiments/{deleted.id}")
    choose("Delete")
    dialog = page.get_by_role("dialog", name="Delete own 2?")
    expect(dialog).to_contain_text("1 trial with its logs, 1 metric point, and 1 checkpoint (5 B)")
    dialog.get_by_role("button", name="Keep as it is").click()
    expect(dialog).to_be_hidden()
    choose("Delete")
    dialog.get_by_role("button", name="Delete it").click()
    expect(page.get_by_role("heading", name="Experiments")).to_be_visible()
    expect(page.get_by_role("alert").filter(has_text="own 2 was deleted.")).to_be_visible()
    expect(page.get_by_role("link", name="own 2", exact=True)).to_have_count(0)


def test_logs_are_filtered_and_the_first_error_found(
    master: Any, open_page: Any, found: list[Any]
) -> None:
    (trial,) = found[2].trials()
    lines = list(trial.iter_logs())
    page = open_page(master, f"/trials/{trial.id}/logs?until={lines[0].time - 3600}")
    expect(page.get_by_role("heading", name="No line matches")).to_be_visible()
    page.get_by_role("textbox", name="Until").fill("")
    log = page.get_by_role("log")
    expect(log.get_by_text("all is well")).to_be_visible()
    page.get_by_role("combobox", name="Stream").click()
    page.get_by_role("option", name="stderr").click()
    expect(log.get_by_text("all is well")).to_have_count(0)
    expect(log.get_by_text("no such data set").first).to_be_visible()
    page.get_by_role("button", name="First error").click()
    expect(page.locator("[data-target]")).to_be_visible()
    expect(page).to_have_url(re.compile(r"line=\d+$"))
    expect(log.get_by_text("all is well")).to_be_visible()
    assert Path(page.url).name.startswith("logs?line=")


@pytest.mark.long
def test_filters_of_logs_wait_behind_a_button_on_a_phone(
    master: Any, open_page: Any, found: list[Any]
) -> None:
    (trial,) = found[2].trials()
    phone = {"width": 390, "height": 844}
    page = open_page(master, f"/trials/{trial.id}/logs", viewport=phone)
    expect(page.get_by_role("log").get_by_text("all is well")).to_be_visible()
    stream = page.get_by_role("combobox", name="Stream")
    expect(stream).to_be_hidden()
    page.get_by_role("button", name="Filters").click()
    stream.click()
    page.get_by_role("option", name="stderr").click()
    expect(page.get_by_role("log").get_by_text("all is well")).to_have_count(0)
    # Filters of an address are seen at once.
    page.reload()
    expect(stream).to_have_value("stderr")


@pytest.mark.long
def test_the_fields_of_a_config_are_offered_while_it_is_typed(master: Any, open_page: Any) -> None:
    page = open_page(master, "/new")
    editor = page.get_by_role("textbox", name="Config in YAML")
    page.wait_for_load_state("networkidle")
    editor.fill("")
    editor.press_sequentially("max_res")
    option = page.get_by_role("option", name="max_restarts")
    option.click()
    # The editor ignores a click right after the list was drawn; a busy machine draws it late.
    page.wait_for_timeout(500)
    if option.is_visible():
        option.click()
    expect(editor).to_have_text(re.compile("^max_restarts"))


def test_a_config_with_problems_has_them_marked_at_their_lines(
    master: Any, open_page: Any, write_config: Any
) -> None:
    page = open_page(master, "/new")
    write_config(
        page,
        "entrypoint: python3 train.py\nsearcher: {name: single, metric: loss}\nmax_restart: 1\n",
    )
    expect(page.get_by_role("listitem").filter(has_text="Line 3: max_restart")).to_be_visible()
    expect(page.locator(".cm-lintRange-error")).to_have_text(["max_restart: 1"])
    expect(page.get_by_role("button", name="Create and start")).to_be_disabled()


def test_the_name_stays_in_sight_while_columns_scroll(
    master: Any, open_page: Any, found: list[Any]
) -> None:
    page = open_page(master, "/experiments?q=rate", viewport={"width": 390, "height": 844})
    name = page.get_by_role("link", name="rate 3", exact=True)
    expect(name).to_be_visible()
    page.get_by_role("columnheader", name="Search").scroll_into_view_if_needed()
    table = page.get_by_role("region", name="Experiments")
    assert table.evaluate("shown => shown.scrollLeft") > 100
    expect(page.get_by_role("columnheader", name="Search")).to_be_in_viewport()
    expect(name).to_be_in_viewport(ratio=1)
