"""Logs in a real browser: colours of terminals, regular expressions, the lines around a hit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

# Colours of all kinds, another sequence, HTML, characters of two units, and 3,000 plain lines.
COLORFUL = r"""
import sys
print("\x1b[31mred\x1b[0m \x1b[1;42mon green\x1b[0m plain \x1b]0;title\x07end")
print("\x1b[33m<b id='planted'>bold?</b><script>window.planted = 1</script>\x1b[0m")
print("\U0001f600\U0001f600 \x1b[38;5;21mblue\x1b[0m \x1b[38;2;0;200;0mgreen\x1b[39m \x1b[2J")
for number in range(3000):
    print(f"step {number} loss=0.{number:04}")
print("ERROR: \x1b[35mthe fan\x1b[0m stands")
"""


@pytest.fixture(scope="module")
def trial(master: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a trial that printed in colours."""
    code: Path = tmp_path_factory.mktemp("colors")
    (code / "train.py").write_text(COLORFUL)
    experiment = master.create(code, name="colours")
    experiment.wait(0.1)
    (trial,) = experiment.trials()
    return trial


def _colors(page: Any, text: str) -> tuple[str, str]:
    """Return the colour and the ground of a piece of a line."""
    piece = page.get_by_role("log").get_by_text(text, exact=True).first
    expect(piece).to_be_visible()
    got: list[str] = piece.evaluate(
        "piece => ['color', 'backgroundColor'].map(name => getComputedStyle(piece)[name])"
    )
    return got[0], got[1]


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_of_a_log_are_shown_from_a_palette_and_nothing_else_of_it_counts(
    master: Any, trial: Any, open_page: Any, find_problems: Callable[..., list[str]], theme: str
) -> None:
    """Pieces have the colours printed; other sequences are gone; markup stays text."""
    page = open_page(master, f"/trials/{trial.id}/logs?q=red", color_scheme=theme)
    red, _ = _colors(page, "red")
    line = page.locator("[data-index='0'] [data-colored]")
    plain: str = line.evaluate("line => getComputedStyle(line).color")
    assert red != plain, f"{red=} must differ from {plain=}"
    _, ground = _colors(page, "on green")
    assert ground != "rgba(0, 0, 0, 0)", f"{ground=} must not be transparent"
    assert find_problems(page) == []
    page.goto(f"/trials/{trial.id}/logs?q=planted")
    expect(page.get_by_text("<b id='planted'>bold?</b>")).to_be_visible()
    expect(page.locator("#planted")).to_have_count(0)
    assert page.evaluate("window.planted") is None, "a script of the log must not run"
    page.goto(f"/trials/{trial.id}/logs?q=blue")
    assert len({_colors(page, name)[0] for name in ("blue", "green")} | {plain}) == 3
    assert find_problems(page) == []


def test_a_search_crosses_colours_and_the_stored_text_is_plain(
    master: Any, trial: Any, open_page: Any
) -> None:
    """What is plain for SDK and search keeps its colours for the page and the download."""
    (line,) = trial.iter_logs(search="red on green")
    assert line.text == "red on green plain end", f"{line.text=}"
    assert line.colors == [(0, "31"), (3, "0"), (4, "1;42"), (12, "0")], f"{line.colors=}"
    page = open_page(master, f"/trials/{trial.id}/logs?q=fan+stands")
    expect(page.locator("mark")).to_have_count(2)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download").click()
    text = Path(saved.value.path()).read_text()
    assert "\x1b[31mred\x1b[0m \x1b[1;42mon green\x1b[0m plain end" in text
    assert "\x1b]0;" not in text


@pytest.mark.long
def test_a_regular_expression_finds_lines_and_the_lines_around_a_hit(
    master: Any, trial: Any, open_page: Any
) -> None:
    """A pattern marks what it found; a hit leads to its neighbours, and back to all hits."""
    page = open_page(master, f"/trials/{trial.id}/logs")
    expect(page.get_by_role("status").filter(has_text="of 3,004 lines")).to_be_visible()
    page.get_by_role("button", name="Regular expression").click()
    box = page.get_by_role("textbox", name="Search in the logs")
    box.fill(r"^step 15\d7 ")
    expect(page.get_by_role("status").filter(has_text="10 lines")).to_be_visible()
    expect(page.locator("mark").first).to_have_text("step 1507 ")
    page.get_by_role("button", name="Show the lines around: step 1537").focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-target]")).to_contain_text("step 1537")
    log = page.get_by_role("log")
    for neighbour in ("step 1536 ", "step 1538 "):
        expect(log.get_by_text(neighbour)).to_be_visible()
    expect(page).to_have_url(re.compile(r"regex=true.*line=\d+"))
    page.get_by_role("button", name="All that was found").click()
    expect(page.get_by_role("status").filter(has_text="10 lines")).to_be_visible()
    box.fill("(")
    expect(page.get_by_role("alert")).to_contain_text("must be a regular expression that RE2 takes")


def test_a_hit_in_the_logs_of_a_search_leads_to_its_trial(
    master: Any, open_page: Any, tmp_path: Path
) -> None:
    """Only a trial has an order of lines, so the neighbours are shown there."""
    (tmp_path / "train.py").write_text("for step in range(50): print(f'step {step} done')")
    searcher = {"name": "random", "metric": "loss", "max_trials": 2}
    space = {"x": {"type": "double", "minval": 0, "maxval": 1}}
    experiment = master.create(tmp_path, searcher=searcher, hyperparameters=space)
    experiment.wait(0.1)
    trial = experiment.trials()[0]
    page = open_page(master, f"/experiments/{experiment.id}/logs?q=step+7+")
    shown = page.get_by_role("log").locator("[data-index]").filter(has_text=f"trial {trial.id}")
    shown.get_by_role("button", name="Show the lines around: step 7 ").click()
    expect(page).to_have_url(re.compile(rf"/trials/{trial.id}/logs\?.*line=\d+"))
    expect(page.get_by_role("log").get_by_text("step 8 done")).to_be_visible()


FAILING = """
for number in range(200):
    print(f"step {number}", flush=True)
raise ValueError("no such table")
"""


@pytest.mark.long
@pytest.mark.parametrize("state", ["Running", "Completed", "Error"])
def test_a_phone_shows_state_and_tail_of_a_log_on_its_first_screen(
    master: Any, trial: Any, open_page: Any, code: Path, state: str
) -> None:
    """There the facts and the error are below the log, which ends above the links at the bottom."""
    number = trial.experiment_id
    if state == "Error":
        (code / "train.py").write_text(FAILING)
    if state != "Completed":
        number = master.create(code, name="tail").id
    size = {"width": 390, "height": 844}
    page = open_page(master, f"/experiments/{number}/logs", viewport=size)
    for kind in ("experiment", "trial"):
        badge = page.get_by_text(state, exact=True).first
        expect(badge).to_be_visible()
        assert badge.bounding_box()["y"] < size["height"] / 4
        log = page.get_by_role("log")
        expect(log.locator("[data-index]").last).to_be_in_viewport()
        bar = page.get_by_role("navigation", name="Pages, at the bottom").bounding_box()["y"]
        box = log.bounding_box()
        end = box["y"] + box["height"]
        assert end <= bar, f"{kind}: the log from {box['y']} to {end} must end above {bar}"
        assert box["height"] >= 240, f"{kind}: {box['height']=}"
        alert = page.get_by_role("alert").filter(has_text="exit code 1")
        expect(alert).to_have_count(int(state == "Error"))
        if kind == "experiment":
            only = master.client.get_experiment(number).trials()[0].id
            page.goto(f"/trials/{only}/logs")


@pytest.mark.long
def test_a_log_that_is_followed_shows_its_newest_line_when_its_box_becomes_lower(
    master: Any, trial: Any, open_page: Any
) -> None:
    """A phone that is turned, or a title that takes another row, hides no line."""
    page = open_page(master, f"/trials/{trial.id}/logs")
    newest = page.get_by_role("log").get_by_text("the fan")
    expect(newest).to_be_in_viewport()
    for height in (1400, 700):
        page.set_viewport_size({"width": 390, "height": height})
        expect(newest).to_be_in_viewport()
