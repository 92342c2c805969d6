"""The documentation as a master serves it: in a browser, without a sign-in."""

import re
from typing import Any

import pytest

from paceline._cluster.master.api.web_ui_files import DOCUMENTATION_PATH

SEARCH_BUTTON = ".md-search__button"


@pytest.fixture(autouse=True)
def _built_documentation() -> None:
    if not (DOCUMENTATION_PATH / "index.html").is_file():
        pytest.skip("NOT TESTED: the documentation is not built. Hint: make docs")


@pytest.mark.long
def test_a_stranger_reads_and_searches_and_nothing_comes_from_elsewhere(
    master: Any, browser: Any
) -> None:
    from playwright.sync_api import expect

    page = browser.new_page(base_url=master.url)
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    # What the policy of the master forbids is said here.
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    try:
        page.goto("/docs")
        expect(page).to_have_url(f"{master.url}/docs/")
        expect(page.get_by_role("link", name="Reference").first).to_be_visible()
        page.goto("/docs/train.html")
        expect(page.get_by_role("heading", name="The train function")).to_be_visible()
        page.locator(SEARCH_BUTTON).first.click()
        page.keyboard.type("prepare_data_loader")
        found = page.locator("a[href*='paceline.train.prepare_data_loader']").first
        expect(found).to_be_visible()
        found.click()
        expect(page).to_have_url(
            re.compile(r"/docs/reference/paceline\.train\.html.*#paceline\.train")
        )
        expect(page.get_by_role("heading", name="prepare_data_loader")).to_be_visible()
    finally:
        page.close()
    assert [url for url in asked if not url.startswith((master.url, "data:", "blob:"))] == []
    assert errors == []


def test_the_head_of_every_page_leads_to_it(master: Any, open_page: Any) -> None:
    page = open_page(master)
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Documentation").click()
    assert opened.value.url == f"{master.url}/docs/"
