"""Stars of a user, and notices of the browser when what one watches ends."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

# In the place of the browser's own: a headless one shows nothing, and refuses the permission.
NOTE_NOTICES = """
window.Notification = class {
  static permission = 'default';
  static async requestPermission() { return (this.permission = 'granted'); }
  constructor(title, options) {
    const noticed = JSON.parse(localStorage.getItem('noticed') ?? '[]');
    noticed.push([title, options.body, options.tag]);
    localStorage.setItem('noticed', JSON.stringify(noticed));
  }
};
Notification.permission = localStorage.getItem('paceline-watched') ? 'granted' : 'default';
"""
FAILING = """
import time
from pathlib import Path

while not Path("finish").exists():
    time.sleep(0.1)
raise ValueError("no such data set")
"""


def _noticed(page: Any) -> list[list[str]]:
    found: list[list[str]] = json.loads(page.evaluate("localStorage.getItem('noticed')") or "[]")
    return found


@pytest.mark.long
def test_a_hidden_tab_tells_that_a_watched_experiment_has_failed(
    master: Any, open_page: Any, code: Path
) -> None:
    """Told once by several tabs, with the error."""
    failing = code.parent / "failing"
    failing.mkdir()
    (failing / "train.py").write_text(FAILING)
    experiment = master.create(failing, name="to fail")
    page = open_page(master, "/")
    page.add_init_script(NOTE_NOTICES)
    page.goto(f"/experiments/{experiment.id}")
    bell = page.get_by_role("button", name="Tell me when it ends")
    bell.click()
    expect(bell).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_text("a notice of the browser tells")).to_be_visible()
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    other = page.context.new_page()
    other.add_init_script(NOTE_NOTICES)
    other.goto(f"{master.url}/experiments")
    (failing / "finish").touch()
    while not _noticed(page):
        page.wait_for_timeout(200)
    [[title, body, tag]] = _noticed(page)
    assert title == "to fail has failed", f"{title=}"
    assert "exit code 1" in body, f"{body=}"
    assert tag == f"paceline/experiments/{experiment.id}", f"{tag=}"
    toasts = [one.get_by_text("to fail has failed").count() for one in (page, other)]
    assert sorted(toasts) == [0, 1], f"{toasts=} must be of one tab"


@pytest.mark.long
def test_what_ended_while_no_tab_was_open_is_told_without_permission_too(
    master: Any, open_page: Any, code: Path
) -> None:
    """A browser that allows no notices shows it on the page, also when one comes back later."""
    experiment = master.create(code, name="to end")
    page = open_page(master, f"/experiments/{experiment.id}")
    page.get_by_role("button", name="Tell me when it ends").press("Enter")
    expect(page.get_by_text("this page tells")).to_be_visible()
    page.goto("about:blank")
    (code / "finish").touch()
    experiment.wait(0.1)
    page.goto(f"{master.url}/cluster")
    expect(page.get_by_text("to end is completed")).to_be_visible()
    page.goto(f"{master.url}/experiments/{experiment.id}")
    expect(page.get_by_role("button", name="Tell me when it ends")).to_have_count(0)
    assert page.evaluate("localStorage.getItem('paceline-watched')") == "[]"


@pytest.mark.long
def test_stars_are_kept_on_the_master_and_filter_the_list(
    master: Any, open_page: Any, unfold: Any, find_problems: Any, tmp_path: Path
) -> None:
    """Set in the list and on the page, seen by another browser, opened by Compare as a view."""
    (tmp_path / "train.py").write_text("")
    made = [master.create(tmp_path, name=f"starred {n}") for n in range(3)]
    for one in made:
        one.wait(0.1)
    page = open_page(master, "/experiments?q=starred")
    star = page.get_by_role("button", name="Star starred 0")
    star.click()
    expect(star).to_have_attribute("aria-pressed", "true")
    page.get_by_role("link", name="starred 2").click()
    # The list has such a star as well, and stays until the page is there.
    expect(page.get_by_role("heading", name="starred 2", level=1)).to_be_visible()
    star = page.get_by_role("button", name="Star starred 2")
    star.press("Enter")
    expect(star).to_have_attribute("aria-pressed", "true")
    other = open_page(master, "/experiments")
    other.get_by_role("switch", name="Starred").press("Space")
    expect(other.get_by_role("status").filter(has_text="2 experiments")).to_be_visible()
    expect(other.get_by_role("link", name="starred 1")).to_have_count(0)
    assert find_problems(other) == []
    other.goto("/compare")
    other.get_by_role("button", name="Views").click()
    other.get_by_role("menuitem", name="Starred by").click()
    unfold(other, "Choose runs")
    expect(other.get_by_text("starred 2").first).to_be_visible()
    expect(other.get_by_text("starred 1")).to_have_count(0)
    other.goto("/experiments?starred=true")
    for number in (0, 2):
        other.get_by_role("button", name=f"Star starred {number}").click()
    expect(other.get_by_role("heading", name="No experiment matches")).to_be_visible()
    other.goto("/compare")
    other.get_by_role("button", name="Views").click()
    expect(other.get_by_role("menuitem", name="Save as a new view")).to_be_visible()
    expect(other.get_by_role("menuitem", name="Starred by")).to_have_count(0)


@pytest.mark.long
def test_two_windows_that_star_at_once_keep_both_stars(
    master: Any, open_page: Any, tmp_path: Path
) -> None:
    """The second finds a newer version, and begins again from it."""
    (tmp_path / "train.py").write_text("")
    made = [master.create(tmp_path, name=f"twice {n}") for n in range(2)]
    pages = [open_page(master, f"/experiments/{one.id}") for one in made]
    stars = [page.get_by_role("button", name=re.compile("^Star")) for page in pages]
    for star in stars:
        expect(star).to_be_enabled()
    for star in stars:
        star.evaluate("star => star.click()")
    for star in stars:
        expect(star).to_have_attribute("aria-pressed", "true")
    page = open_page(master, "/experiments?starred=true")
    for one in made:
        expect(page.get_by_role("link", name=one.data.name)).to_be_visible()
