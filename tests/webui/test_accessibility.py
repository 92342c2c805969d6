"""What axe finds on the pages: nothing."""

import json
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

SEARCHED = """
import paceline

with paceline.core.init() as context:
    rate = paceline.get_cluster_info().trial.hparams["rate"]
    for epoch in range(1, 4):
        context.train.report_training_metrics(epoch, {"train_loss": rate + 1 / epoch})
        context.train.report_histogram(epoch, "weights", [rate, epoch, 0.5], num_bins=3)
        context.train.report_text(epoch, "samples/text", f"epoch {epoch}")
        context.train.report_validation_metrics(epoch, {"test_loss": rate, "epochs": epoch})
        print(f"WARNING: epoch {epoch}", flush=True)
    context.train.report_table(3, "errors", [{"file": "a.png", "loss": 0.5}])
    context.train.report_html(3, "samples/page", "<html lang='en'><title>a</title><p>page")
    with context.checkpoint.store_path({"steps_completed": epoch}) as (path, _):
        (path / "state.txt").write_text("state")
"""
PAGES = {
    "/": "Home",
    "/experiments?columns=%5B%22hparam%3Arate%22%5D": "Experiments",
    "/experiments?q=nothing-is-called-so": "Experiments",
    "/new": "New experiment",
    "/cluster": "Cluster",
}
EXPERIMENT_TABS = [
    "", "?table=true", "/trials", "/hyperparameters", "/hyperparameters?view=scatter",
    "/hyperparameters?view=heat", "/search", "/checkpoints", "/code", "/lineage", "/notes",
    "/logs",
]  # fmt: skip
TRIAL_TABS = [
    "", "/media", "/checkpoints", "/hyperparameters", "/profiler", "/attempts", "/lineage", "/logs",
]  # fmt: skip


# Not for the module: its tests need not run one after the other.
@pytest.fixture(scope="session")
def searched(master: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a search that has ended."""
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text(SEARCHED)
    searcher = {
        "name": "async_halving", "metric": "test_loss", "time_metric": "epochs", "max_time": 3,
        "max_trials": 3, "num_rungs": 2, "divisor": 3,
    }  # fmt: skip
    hparams = {name: {"type": "double", "minval": 0.0, "maxval": 1.0} for name in ("rate", "other")}
    experiment = master.create(
        code, name="searched", searcher=searcher, hyperparameters=hparams, labels=["a label"]
    )
    assert experiment.wait(0.1).value == "COMPLETED"
    return experiment


@pytest.mark.long
@pytest.mark.parametrize(
    ("theme", "size"),
    [
        ("light", {"width": 1280, "height": 800}),
        pytest.param("dark", {"width": 390, "height": 844}, marks=pytest.mark.slow),
        pytest.param("dark", {"width": 1280, "height": 800}, marks=pytest.mark.slow),
        pytest.param("light", {"width": 390, "height": 844}, marks=pytest.mark.slow),
        pytest.param("light", {"width": 1440, "height": 900}, marks=pytest.mark.slow),
        pytest.param("dark", {"width": 1440, "height": 900}, marks=pytest.mark.slow),
        # What is left of 1,280 by 1,600 pixels at 200 %. In less height the bar at the bottom
        # covers a part of what can be scrolled, which axe takes for its size.
        pytest.param("light", {"width": 640, "height": 800}, marks=pytest.mark.slow),
        pytest.param("dark", {"width": 640, "height": 800}, marks=pytest.mark.slow),
    ],
    ids=[
        "light-desktop",
        "dark-phone",
        "dark-desktop",
        "light-phone",
        "light-wide",
        "dark-wide",
        "light-zoomed",
        "dark-zoomed",
    ],
)
def test_axe_finds_nothing_on_any_page(
    master: Any,
    searched: Any,
    open_page: Any,
    go_on: Any,
    find_problems: Any,
    theme: str,
    size: dict[str, int],
) -> None:
    trial = searched.trials()[0].id
    page = open_page(master, color_scheme=theme, viewport=size)
    pages = {
        **PAGES,
        **{f"/experiments/{searched.id}{tab}": "searched" for tab in EXPERIMENT_TABS},
        **{f"/trials/{trial}{tab}": f"Trial {trial}" for tab in TRIAL_TABS},
        f"/compare?trials=[{trial},{trial + 1}]": "Compare",
        f"/compare?experiments=[{searched.id}]&group=[%22*%22]": "Compare",
        f"/compare?experiments=[{searched.id}]&view=differences&base={trial}": "Compare",
    }
    problems = {}
    for path, title in pages.items():
        go_on(page, path)
        expect(page).to_have_title(f"{title} · Paceline")
        if found := find_problems(page, "best-practice"):
            problems[path] = found
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    for name in ("Edit name and labels", "Delete"):
        page.goto(f"/experiments/{searched.id}")
        page.get_by_role("button", name="More actions").click()
        page.get_by_role("menuitem", name=name).click()
        page.get_by_role("dialog").wait_for()
        expect(page.get_by_role("menu")).to_have_count(0)
        if found := find_problems(page):
            problems[name] = found
    assert problems == {}, json.dumps(problems, indent=2)


@pytest.mark.long
@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_axe_finds_nothing_in_the_search_and_the_sheet_of_shortcuts(
    master: Any, searched: Any, open_page: Any, find_problems: Any, theme: str
) -> None:
    page = open_page(master, f"/experiments/{searched.id}/lineage", color_scheme=theme)
    expect(page.get_by_role("heading", name=searched.name)).to_be_visible()
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Search everything").fill("searched")
    expect(page.get_by_role("region", name="Experiments").get_by_role("link")).to_have_count(1)
    problems = find_problems(page)
    page.get_by_role("combobox", name="Search everything").fill("colour = 3")
    expect(page.get_by_role("alert")).to_be_visible()
    problems += find_problems(page)
    page.get_by_role("dialog", name="Search").get_by_role("button", name="Close").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Shift+?")
    expect(page.get_by_role("cell", name="New experiment")).to_be_visible()
    assert problems + find_problems(page) == []


@pytest.mark.long
@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_axe_finds_nothing_in_the_dialogs_of_comparisons(
    master: Any, searched: Any, open_page: Any, find_problems: Any, unfold: Any, theme: str
) -> None:
    page = open_page(master, f"/compare?experiments=[{searched.id}]", color_scheme=theme)
    unfold(page, "Choose runs")
    problems = {}
    for name in ("Metrics and x axis of test_loss", "Views", "Filter", "Download test_loss"):
        page.get_by_role("button", name=name, exact=True).click()
        if name.startswith("Download"):
            expect(page.get_by_role("menu", name=name)).to_be_visible()
            problems[name] = find_problems(page)
            break
        if name == "Views":
            page.get_by_role("menuitem", name="Save as a new view").click()
            expect(page.get_by_role("menu")).to_have_count(0)
        page.get_by_role("dialog").wait_for()
        if found := find_problems(page):
            problems[name] = found
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
    assert not any(problems.values()), json.dumps(problems, indent=2)


@pytest.mark.long
def test_axe_finds_nothing_where_one_signs_in(
    master: Any, open_page: Any, find_problems: Any
) -> None:
    for theme in ("light", "dark"):
        page = open_page(master, "/sign-in?problem=link", is_signed_in=False, color_scheme=theme)
        page.get_by_role("button", name="Sign in").wait_for()
        assert find_problems(page) == []


@pytest.mark.long
def test_everything_can_be_reached_by_keyboard(master: Any, searched: Any, open_page: Any) -> None:
    page = open_page(master, "/experiments")
    expect(page.get_by_role("link", name="searched")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "searched":
            break
    expect(page.get_by_role("link", name="searched")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="searched", level=1)).to_be_visible()
    page.get_by_role("button", name="More actions").focus()
    page.keyboard.press("Enter")
    # A menu that is still opening takes no keys.
    expect(page.get_by_role("menuitem").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="More actions")).to_be_focused()


@pytest.mark.parametrize("width", [767, 768])
def test_a_page_has_one_navigation_at_any_width(master: Any, open_page: Any, width: int) -> None:
    """At the side from 768 px on, else at the bottom; style sheets and code agree."""
    page = open_page(master, "/", viewport={"width": width, "height": 800})
    at_the_side = page.get_by_role("navigation", name="Pages", exact=True)
    at_the_bottom = page.get_by_role("navigation", name="Pages, at the bottom")
    expect(at_the_side.or_(at_the_bottom)).to_have_count(1)
    expect(at_the_side if width >= 768 else at_the_bottom).to_be_visible()


@pytest.mark.parametrize("width", [390, 768, 1024])
def test_names_of_what_has_ended_have_room(
    master: Any, searched: Any, open_page: Any, width: int
) -> None:
    page = open_page(master, "/", viewport={"width": width, "height": 800})
    name = page.get_by_role("region", name="Recently ended").get_by_role("link", name="searched")
    expect(name.first).to_be_visible()
    # Where it has no room, it is broken into lines of some letters.
    assert name.first.bounding_box()["height"] < 30
