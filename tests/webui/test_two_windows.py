"""Two windows on one thing, and a master that is away while a page is opened."""

from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect


@pytest.mark.long
def test_notes_that_two_windows_edit_are_not_lost(master: Any, open_page: Any, code: Path) -> None:
    experiment = master.create(code, name="noted")
    experiment.kill()
    path = f"/experiments/{experiment.id}/notes"
    mine, theirs = open_page(master, path), open_page(master, path)
    mine.get_by_role("textbox", name="Notes").fill("mine")
    theirs.get_by_role("textbox", name="Notes").fill("theirs")
    # What is shown comes above the button, and moves it.
    expect(theirs.get_by_role("region", name="Notes as they are shown")).to_have_text("theirs")
    theirs.get_by_role("button", name="Save").click()
    expect(theirs.get_by_text("Saved", exact=True)).to_be_visible()
    alert = mine.get_by_role("alert")
    expect(alert).to_contain_text("Someone else has saved these notes")
    expect(alert.get_by_role("textbox", name="Their notes")).to_have_value("theirs")
    expect(mine.get_by_role("button", name="Save")).to_be_disabled()
    alert.get_by_role("button", name="Put mine below theirs").click()
    expect(alert).to_have_count(0)
    mine.get_by_role("button", name="Save").click()
    expect(mine.get_by_text("Saved", exact=True)).to_be_visible()
    expect(theirs.get_by_role("textbox", name="Notes")).to_have_value("theirs\n\nmine")


def test_a_page_first_opened_while_the_master_is_away_is_there(master: Any, open_page: Any) -> None:
    page = open_page(master, "/sign-in", loads_ahead=True)
    # The code of the pages comes in the order of their addresses; that of the cluster is last.
    with page.expect_event("requestfinished", lambda request: "/assets/Cluster-" in request.url):
        page.goto("/")
    page.wait_for_load_state("networkidle")
    page.context.set_offline(True)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Compare").click()
    expect(page.get_by_role("heading", name="Compare trials")).to_be_visible()
    page.context.set_offline(False)


def test_a_page_whose_code_is_missing_heals_by_itself(master: Any, open_page: Any) -> None:
    page = open_page(master, "/sign-in", loads_ahead=True)
    failures = []

    def fail_twice(route: Any) -> None:
        if len(failures) < 2:
            failures.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    page.route("**/assets/Compare-*.js", fail_twice)
    page.goto("/compare")
    expect(page.get_by_role("heading", name="Compare trials")).to_be_visible()
    assert len(failures) == 2
