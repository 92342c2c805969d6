"""What waits, what is unknown and what is unreachable: said once, in the same words everywhere."""

import re
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect


def test_home_says_why_a_queued_experiment_waits(master: Any, open_page: Any, code: Path) -> None:
    whole = {"resources": {"slots_per_trial": 2}}
    experiments = [master.create(code, name=name, **whole) for name in ("holder", "waiting")]
    try:
        page = open_page(master, "/")
        cards = page.get_by_role("article")
        expect(cards.filter(has_text="holder")).to_contain_text("1 of 1 trial running")
        card = cards.filter(has_text="waiting")
        expect(card).to_contain_text("Queued")
        expect(card).to_contain_text("It waits until 2 of 2 slots are free.")
    finally:
        for experiment in reversed(experiments):
            experiment.kill()
    expect(card).to_have_count(0)


@pytest.mark.long
def test_a_progress_that_nothing_tells_is_a_bar_nowhere(
    master: Any, open_page: Any, code: Path
) -> None:
    experiment = master.create(code, name="endless")
    try:
        page = open_page(master, "/")
        card = page.get_by_role("article").filter(has_text="endless")
        expect(card).to_contain_text("1 of 1 trial running")
        expect(card.get_by_role("progressbar")).to_have_count(0)
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Experiments").click()
        row = page.get_by_role("row").filter(has_text="endless")
        expect(row).to_contain_text("Running")
        expect(row.get_by_role("progressbar")).to_have_count(0)
        page.goto(f"{master.url}/experiments/{experiment.id}")
        expect(page.get_by_role("heading", name="endless")).to_be_visible()
        expect(page.get_by_text(re.compile(r"\b0 ?%"))).to_have_count(0)
    finally:
        experiment.kill()


@pytest.mark.long
def test_one_box_says_that_the_master_does_not_answer(
    master: Any, open_page: Any, go_on: Any
) -> None:
    page = open_page(master, "/models")
    # Home asks for several things; each of them fails.
    page.route("**/api/v1/**", lambda route: route.abort())
    go_on(page, "/")
    boxes = page.get_by_role("alert").filter(has_text="No connection")
    expect(boxes).to_have_count(1)
    page.unroute("**/api/v1/**")
    boxes.get_by_role("button", name="Try again").click()
    expect(boxes).to_have_count(0)
