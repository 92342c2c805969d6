"""Compare: several metrics in a panel, own axes, filters, saved views, curves in lists."""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline._cluster.messages.master_models import View

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

SWEEP = """
import paceline

with paceline.core.init() as context:
    hparams = paceline.get_cluster_info().trial.hparams
    for step in range(1, 6):
        loss = hparams["lr"] / step + hparams["seed"] / 100
        metrics = {"test_loss": loss, "accuracy": 1 - loss, "epoch": step / 2}
        context.train.report_validation_metrics(step, metrics)
"""


@pytest.fixture(scope="module")
def sweep(master: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return an ended experiment of six trials."""
    code = tmp_path_factory.mktemp("sweep")
    (code / "train.py").write_text(SWEEP)
    hparams = {
        name: {"type": "categorical", "vals": values}
        for name, values in (("lr", [0.1, 0.2]), ("seed", [0, 1, 2]))
    }
    searcher = {"name": "grid", "metric": "test_loss"}
    experiment = master.create(
        code, name="swept", hyperparameters=hparams, searcher=searcher, labels=["tuned"]
    )
    assert experiment.wait(0.1).value == "COMPLETED"
    return experiment


def views_of(master: Any) -> list[View]:
    found: list[View] = master.client._session.get("views", list[View])
    return found


@pytest.fixture
def clean_views(master: Any) -> Iterator[None]:
    """Leave no view: a default one would be opened by other tests."""
    yield
    for view in views_of(master):
        query = {"version": view.version}
        master.client._session.send("DELETE", f"views/{view.id}", params=query)


@pytest.mark.long
def test_a_panel_has_several_metrics_and_an_x_axis_of_its_own(
    master: Any, sweep: Any, open_page: Any
) -> None:
    # The places of points depend on the width.
    size = {"width": 1280, "height": 800}
    page = open_page(master, f"/compare?experiments=[{sweep.id}]", viewport=size)
    expect(page.get_by_role("img", name="accuracy: 6 lines")).to_be_visible()
    page.get_by_role("button", name="Metrics and x axis of accuracy").click()
    dialog = page.get_by_role("dialog", name="Panel accuracy")
    dialog.get_by_role("combobox", name="Further metrics").click()
    page.get_by_role("option", name="test_loss").click()
    dialog.get_by_role("combobox", name="X axis").click()
    page.get_by_role("option", name="epoch").click()
    dialog.get_by_role("button", name="Done").click()
    expect(dialog).to_have_count(0)
    chart = page.get_by_role("img", name="accuracy, test_loss: 12 lines")
    expect(chart).to_be_visible()
    # What the cursor tells is along the panel's own axis.
    chart.hover()
    own = page.get_by_role("region", name="accuracy, test_loss")
    expect(own.get_by_text("epoch", exact=False).first).to_be_visible()
    page.mouse.move(5, 5)
    # A zoom along it leaves the other panels as they are.
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=5)
    page.mouse.up()
    expect(page.get_by_role("button", name="Show all")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("img", name="accuracy, test_loss: 12 lines")).to_be_visible()
    page.get_by_role("combobox", name="Group by").click()
    page.get_by_role("option", name="Everything but the seed").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("img", name="accuracy, test_loss: 4 lines")).to_be_visible()
    page.get_by_role("combobox", name="Spread").click()
    page.get_by_role("option", name="25 to 75 %").click()
    expect(page.get_by_role("img", name="accuracy, test_loss: 4 lines")).to_be_visible()
    alone = page.get_by_role("region", name="test_loss", exact=True)
    alone.get_by_role("img", name="test_loss: 2 lines").hover(position={"x": 270, "y": 100})
    # Quartiles of lr 0.2 at batch 5 among 0.04, 0.05 and 0.06.
    expect(alone.get_by_text("0.045 to 0.055, 3 runs")).to_be_visible()


@pytest.mark.long
def test_a_chart_is_a_picture_for_a_paper_whatever_the_page_looks_like(
    master: Any, sweep: Any, open_page: Any
) -> None:
    address = f"/compare?experiments=[{sweep.id}]&group=[%22lr%22]"
    files: dict[str, bytes] = {}
    for theme in ("light", "dark"):
        page = open_page(master, address, color_scheme=theme)
        expect(page.get_by_role("img", name="accuracy: 2 lines")).to_be_visible()
        for kind in ("SVG", "PNG"):
            page.get_by_role("button", name="Download accuracy", exact=True).click()
            with page.expect_download() as download:
                page.get_by_role("menuitem", name=kind).click()
            assert download.value.suggested_filename == f"accuracy.{kind.lower()}"
            files[theme + kind] = Path(download.value.path()).read_bytes()
    text = files["lightSVG"].decode()
    # Ids that ECharts counts over all its pictures are no difference.
    assert re.sub(r"zr\d+", "", files["darkSVG"].decode()) == re.sub(r"zr\d+", "", text)
    svg = ElementTree.fromstring(text)
    shown = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"batches", "accuracy", "lr 0.1", "lr 0.2"} <= {*shown}
    # The spread of each group, and its mean.
    assert text.count('fill-opacity="0.18"') == 2
    assert text.count('stroke="#0072b2"') >= 1
    width, height = struct.unpack(">II", files["darkPNG"][16:24])
    assert (files["darkPNG"][:8], width) == (b"\x89PNG\r\n\x1a\n", 2160)
    assert height > 1200


@pytest.mark.long
def test_a_phone_shows_a_curve_in_the_upper_half_of_a_comparison(
    master: Any, sweep: Any, open_page: Any, unfold: Any
) -> None:
    """Runs and options of charts wait behind buttons; what filters them is never out of sight."""
    size = {"width": 390, "height": 844}
    page = open_page(master, f"/compare?experiments=[{sweep.id}]", viewport=size)
    chart = page.locator("canvas").first
    expect(chart).to_be_visible()
    top = chart.bounding_box()["y"]
    assert top < size["height"] / 2, f"the first curve begins at {top}"
    expect(page.get_by_text("6 of 6 runs shown")).to_be_in_viewport()
    search = page.get_by_role("combobox", name="Search runs")
    expect(search).to_have_count(0)
    unfold(page, "Choose runs")
    page.get_by_role("region", name="List of runs").get_by_role("checkbox").first.click()
    expect(page.get_by_text("5 of 6 runs shown")).to_be_visible()
    expect(page.get_by_role("textbox", name="Filter the metrics")).to_be_hidden()
    unfold(page)
    page.get_by_role("textbox", name="Filter the metrics").fill("accuracy")
    expect(page).to_have_url(re.compile("q=accuracy"))
    page.goto(f"/compare?experiments=[{sweep.id}]&q=loss&runs=lr < blue")
    expect(page.get_by_role("alert")).to_contain_text("`lr` must be compared to a number")
    search.fill("lr < 1")
    expect(page.get_by_text("6 of 6 runs shown")).to_be_visible()
    expect(search).to_be_visible()
    expect(page.get_by_text("1 of 2 charts", exact=True)).to_be_visible()


@pytest.mark.long
def test_the_panel_search_takes_regular_expressions(
    master: Any, sweep: Any, open_page: Any, unfold: Any
) -> None:
    page = open_page(master, f"/compare?experiments=[{sweep.id}]")
    unfold(page)
    expect(page.get_by_text("2 charts", exact=True)).to_be_visible()
    page.get_by_role("switch", name="Regular expression").click()
    search = page.get_by_role("textbox", name="Filter the metrics")
    search.fill("^(test_)?loss$")
    expect(page.get_by_text("1 of 2 charts", exact=True)).to_be_visible()
    search.fill("loss(")
    expect(page.get_by_text("Invalid regular expression")).to_be_visible()
    # Nothing is hidden by what cannot be read.
    expect(page.get_by_text("2 charts", exact=True)).to_be_visible()


@pytest.mark.long
def test_runs_are_chosen_by_state_label_hyperparameter_and_metric(
    master: Any, sweep: Any, open_page: Any, unfold: Any
) -> None:
    page = open_page(master, f"/compare?experiments=[{sweep.id}]")
    expect(page.get_by_text("6 of 6 runs shown")).to_be_visible()
    unfold(page, "Choose runs")
    page.get_by_role("button", name="Filter", exact=True).click()
    page.get_by_role("combobox", name="Column", exact=True).fill("seed")
    page.get_by_role("option", name="seed", exact=True).click()
    page.get_by_role("combobox", name="Comparison").click()
    page.get_by_role("option", name="=", exact=True).click()
    page.get_by_role("textbox", name="Value").fill("2")
    page.get_by_role("button", name="Add the filter").click()
    # Each run by its own value, not all of an experiment that has one.
    expect(page.get_by_text("2 of 2 runs shown")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("combobox", name="State of the runs").click()
    page.get_by_role("option", name="Error", exact=True).click()
    expect(page.get_by_text("No run is found.")).to_be_visible()
    page.get_by_role("combobox", name="State of the runs").click()
    page.get_by_role("option", name="Completed", exact=True).click()
    expect(page.get_by_text("2 of 2 runs shown")).to_be_visible()
    labels = page.get_by_role("combobox", name="Labels of the runs")
    labels.fill("tuned")
    labels.press("Enter")
    expect(page.get_by_text("2 of 2 runs shown")).to_be_visible()
    page.reload()
    expect(page.get_by_text("2 of 2 runs shown")).to_be_visible()
    unfold(page, "Choose runs")
    page.get_by_role("button", name="Remove the filter seed = 2", exact=True).click()
    expect(page.get_by_text("6 of 6 runs shown")).to_be_visible()


@pytest.mark.long
@pytest.mark.usefixtures("clean_views")
def test_a_view_is_saved_opened_by_default_and_not_overwritten_unasked(
    master: Any, sweep: Any, open_page: Any, unfold: Any
) -> None:
    mine = open_page(master, f"/compare?experiments=[{sweep.id}]&x=time")
    mine.get_by_role("button", name="Views").click()
    mine.get_by_role("menuitem", name="Save as a new view").click()
    dialog = mine.get_by_role("dialog", name="Save as a new view")
    dialog.get_by_role("textbox", name="Name").fill("over time")
    dialog.get_by_role("switch", name="Compare opens this view by default").click()
    dialog.get_by_role("button", name="Save the view").click()
    expect(mine.get_by_role("button", name="over time", exact=True)).to_be_visible()

    theirs = open_page(master, "/compare")
    expect(theirs.get_by_role("button", name="over time", exact=True)).to_be_visible()
    expect(theirs.get_by_text("6 of 6 runs shown")).to_be_visible()
    unfold(theirs)
    expect(theirs.get_by_role("combobox", name="X axis")).to_have_value("Time")
    theirs.get_by_role("switch", name="Log scale").click()
    theirs.get_by_role("button", name="Save", exact=True).click()
    expect(theirs.get_by_role("button", name="over time", exact=True)).to_be_visible()

    unfold(mine)
    mine.get_by_role("switch", name="Clip outliers").click()
    expect(mine.get_by_role("button", name="over time (changed)")).to_be_visible()
    mine.get_by_role("button", name="Save", exact=True).click()
    conflict = mine.get_by_role("dialog", name="This view was changed elsewhere")
    conflict.get_by_role("button", name="Save mine under another name").click()
    dialog = mine.get_by_role("dialog", name="Save as a new view")
    dialog.get_by_role("textbox", name="Name").fill("over time")
    dialog.get_by_role("button", name="Save the view").click()
    expect(dialog.get_by_role("alert")).to_contain_text("The name of a view must be new")
    dialog.get_by_role("textbox", name="Name").fill("clipped")
    dialog.get_by_role("button", name="Save the view").click()
    expect(mine.get_by_role("button", name="clipped", exact=True)).to_be_visible()

    views = {one.name: one for one in views_of(master)}
    assert sorted(views) == ["clipped", "over time"]
    assert "log=true" in views["over time"].search
    assert "clip=true" in views["clipped"].search
    # A link to a view is short.
    mine.goto(f"/compare?saved={views['over time'].id}")
    unfold(mine)
    expect(mine.get_by_role("switch", name="Log scale")).to_be_checked()
    mine.get_by_role("button", name="over time", exact=True).click()
    mine.get_by_role("menuitem", name="Delete this view").click()
    mine.get_by_role("button", name="Delete it").click()
    expect(mine.get_by_role("button", name="Views", exact=True)).to_be_visible()
    theirs.reload()
    expect(theirs.get_by_text("This view is deleted")).to_be_visible()


@pytest.mark.long
def test_a_view_says_which_of_its_runs_are_deleted(master: Any, sweep: Any, open_page: Any) -> None:
    trial = sweep.trials()[0].id
    page = open_page(
        master, f"/compare?experiments=[{sweep.id},999998]&top=[%22{trial}%22,%22999999%22]"
    )
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("There is no trial 999999. There is no experiment 999998.")
    expect(page.get_by_text("6 of 6 runs shown")).to_be_visible()


def test_lists_draw_the_curve_of_the_searched_metric_in_joined_requests(
    master: Any, sweep: Any, open_page: Any
) -> None:
    page = open_page(master, "/")
    asked: list[Any] = []
    page.on(
        "request",
        lambda one: asked.append(one.post_data_json) if "/metric-series" in one.url else None,
    )
    page.goto(f"/experiments/{sweep.id}/trials")
    expect(page.get_by_role("img", name="test_loss from")).to_have_count(6)
    # All rows are drawn at a time, so one request has what they need.
    assert sum(len(one["series"]) for one in asked) == 6
    assert len(asked) < 6
    page.goto("/experiments?q=swept")
    expect(page.get_by_role("img", name="test_loss from 0.1 to 0.02")).to_be_visible()


SPIKES = """
import paceline

with paceline.core.init() as context:
    hparams = paceline.get_cluster_info().trial.hparams
    for step in range(1, 3001):
        # The extremes stand alone in the middle.
        value = {1500: -hparams["lr"], 1501: 9.0}.get(step, hparams["lr"] + hparams["seed"])
        context.train.report_training_metrics(step, {"height": value})
"""


@pytest.mark.long
def test_bars_and_box_plots_show_one_number_of_each_run(
    master: Any, open_page: Any, find_problems: Any, tmp_path: Path, unfold: Any
) -> None:
    """Last, least and greatest values are exact however long the series; a box holds a group."""
    (tmp_path / "train.py").write_text(SPIKES)
    hparams = {
        name: {"type": "categorical", "vals": values}
        for name, values in (("lr", [0.25, 0.5]), ("seed", [0, 1, 3]))
    }
    experiment = master.create(
        tmp_path, name="spikes", hyperparameters=hparams,
        searcher={"name": "grid", "metric": "height"},
    )  # fmt: skip
    assert experiment.wait(0.1).value == "COMPLETED"
    page = open_page(master, f"/compare?experiments=[{experiment.id}]")
    page.get_by_role("button", name="Metrics and x axis of height").press("Enter")
    dialog = page.get_by_role("dialog", name="Panel height")
    dialog.get_by_role("combobox", name="Drawn as").press("Enter")
    page.get_by_role("option", name="Bars").click()
    dialog.get_by_role("combobox", name="Number").press("Enter")
    page.get_by_role("option", name="Least value").click()
    assert find_problems(page) == []
    dialog.get_by_role("button", name="Done").click()
    expect(page.get_by_role("img", name="least height: bars of 6 rows")).to_be_visible()
    unfold(page)
    page.get_by_role("switch", name="As tables").click()
    cells = page.get_by_role("region", name="least height").locator("tbody td")
    expect(cells.filter(has_text=re.compile("^-0.25$")).first).to_be_visible()
    expect(cells.filter(has_text=re.compile("^-0.5$")).first).to_be_visible()
    assert find_problems(page) == []
    page.goto(
        f"/compare?experiments=[{experiment.id}]&group=[%22lr%22]&table=true"
        "&panels={%22training/height%22:{%22as%22:%22box%22}}"
    )
    row = page.get_by_role("row").filter(has_text="lr 0.5")
    # 0.5, 1.5 and 3.5: their mean, and the five numbers.
    expect(row.locator("td")).to_have_text(
        ["lr 0.5", "3", "1.8333", "0.5", "1", "1.5", "2.5", "3.5"]
    )
    unfold(page)
    page.get_by_role("switch", name="As tables").click()
    chart = page.get_by_role("img", name="last height: box plots of 2 rows")
    expect(chart.locator("canvas")).to_be_visible()
    files = {}
    for kind in ("CSV, each run", "SVG, as drawn", "PNG, as drawn"):
        page.get_by_role("button", name="Download last height").click()
        with page.expect_download() as caught:
            page.get_by_role("menuitem", name=kind).click()
        files[kind[:3]] = caught.value.path().read_bytes()
    lines = files["CSV"].decode().split("\r\n")
    assert lines[0] == "Run or group,Run,last height"
    assert sum(line.startswith("lr 0.5,") for line in lines) == 3
    # The boxes and the names of their groups, in light colours on white.
    assert {"lr 0.5", "last height"} <= set(re.findall(r">([^<>]+)</text>", files["SVG"].decode()))
    assert "#ffffff" in files["SVG"].decode()
    assert files["PNG"].startswith(b"\x89PNG")
    page.reload()
    expect(chart.locator("canvas")).to_be_visible()
    for viewport in ({"width": 390, "height": 844}, {"width": 1440, "height": 900}):
        page.set_viewport_size(viewport)
        expect(chart).to_be_visible()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= viewport["width"], f"{width=} must fit {viewport=}"


@pytest.mark.long
def test_trials_chosen_on_an_axis_are_in_the_address(
    master: Any, sweep: Any, open_page: Any
) -> None:
    """A part of the first axis, which another window opens as it was."""
    page = open_page(master, f"/experiments/{sweep.id}/hyperparameters")
    expect(page.get_by_text("All 6 trials, the best first")).to_be_visible()
    box = page.get_by_role("img", name="Parallel coordinates of 6").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 180, steps=5)
    page.mouse.up()
    chosen = page.get_by_text("3 of 6 shown trials chosen")
    expect(chosen).to_be_visible()
    expect(page).to_have_url(re.compile(r"brush=.*lr"))
    other = open_page(master, page.url.removeprefix(master.url))
    expect(other.get_by_text("3 of 6 shown trials chosen")).to_be_visible()


@pytest.mark.long
def test_curves_that_come_late_are_no_empty_chart(master: Any, sweep: Any, open_page: Any) -> None:
    """A chart says that it loads, for as long as a slow master has not answered."""
    page = open_page(master, "/")
    held: list[Any] = []
    page.route("**/api/v1/metric-series", lambda route: held.append(route))
    page.goto(f"/experiments/{sweep.id}")
    chart = page.get_by_role("region", name=re.compile("Learning curves"))
    expect(chart.get_by_text("Loading …")).to_be_visible()
    expect(page.get_by_text("No points yet")).to_have_count(0)
    page.route("**/api/v1/metric-series", lambda route: route.continue_())
    for route in held:
        route.continue_()
    expect(chart.locator("canvas").first).to_be_visible()
