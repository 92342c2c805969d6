"""Notes as Markdown in a real browser: what they show, where links lead, and what stays dead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

EVIL = """
<script>window.planted = 1</script><img src=x onerror="window.planted = 2">

[one](javascript:window.planted=3) [two](JaVaScRiPt:alert(1)) [three](data:text/html,<b>1</b>)
[four](vbscript:x) [five](//evil.example/x) <javascript:alert(1)>
![pixel](https://evil.example/pixel.png) [seven]: javascript:1 [eight][e]

[e]: javascript:window.planted=4 "title"

<a href="javascript:window.planted=5">nine</a> <svg onload="window.planted=6"></svg>
<iframe src="https://evil.example"></iframe><style>body{display:none}</style>
[ten](https://evil.example/" onclick="window.planted=7)
"""


@pytest.fixture
def noted(master: Any, tmp_path: Path) -> Any:
    """Return an ended experiment for notes."""
    (tmp_path / "train.py").write_text("")
    experiment = master.create(tmp_path, name="to be noted")
    experiment.wait(0.1)
    return experiment


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_notes_are_shown_as_markdown_with_links_into_the_app(
    master: Any,
    noted: Any,
    open_page: Any,
    find_problems: Callable[..., list[str]],
    theme: str,
) -> None:
    """Headings, lists, tables and code; runs by their words; links by the keyboard alone."""
    (trial,) = noted.trials()
    text = (
        f"# Result\n\n- **trial {trial.id}** wins, see experiment {noted.id} and view 1\n"
        f"- [its logs](/trials/{trial.id}/logs), `trial {trial.id}` stays code\n\n"
        "| lr | loss |\n|---|---|\n| 0.1 | 2 |\n\nhttps://example.org/paper\n"
    )
    page = open_page(master, f"/experiments/{noted.id}/notes", color_scheme=theme)
    page.get_by_role("textbox", name="Notes", exact=True).fill(text)
    shown = page.get_by_role("region", name="Notes as they are shown")
    expect(shown.get_by_role("heading", name="Result", level=3)).to_be_visible()
    expect(shown.get_by_role("cell", name="0.1")).to_be_visible()
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved", exact=True)).to_be_visible()
    assert find_problems(page) == []
    expect(shown.get_by_role("link", name="view 1")).to_have_attribute("href", "/compare?saved=1")
    expect(shown.get_by_role("link", name=f"trial {trial.id}")).to_have_count(1)
    with page.context.expect_page() as opened:
        shown.get_by_role("link", name="https://example.org/paper").press("Enter")
    assert opened.value.evaluate("window.opener") is None, "the other site must not hold this page"
    opened.value.close()
    page.evaluate("window.stays = true")
    shown.get_by_role("link", name="its logs").press("Enter")
    expect(page.get_by_role("heading", name=f"Trial {trial.id}")).to_be_visible()
    assert page.evaluate("window.stays"), "a link into the app must not load it anew"
    assert page.url.endswith(f"/trials/{trial.id}/logs"), f"{page.url=}"


@pytest.mark.long
def test_markdown_of_a_stranger_runs_nothing_and_asks_no_other_site(
    master: Any, noted: Any, open_page: Any
) -> None:
    """Scripts, addresses of scripts, frames, styles and pictures are text or nothing."""
    noted.edit(notes=EVIL)
    page = open_page(master, "/")
    asked: list[str] = []
    page.context.on("request", lambda request: asked.append(request.url))
    page.goto(f"/experiments/{noted.id}/notes")
    shown = page.get_by_role("region", name="Notes as they are shown")
    expect(shown.get_by_text("window.planted = 1")).to_be_visible()
    for link in shown.get_by_role("link").all():
        address = link.get_attribute("href")
        assert address.startswith("https://evil.example"), f"{address=}"
    tags = shown.evaluate("shown => [...shown.querySelectorAll('*')].map(one => one.localName)")
    assert not {"script", "img", "svg", "iframe", "style"} & set(tags), f"{tags=}"
    attributes = shown.evaluate(
        "shown => [...shown.querySelectorAll('a')].flatMap(one => one.getAttributeNames())"
    )
    assert set(attributes) <= {"href", "title"}, f"{attributes=}"
    assert page.evaluate("window.planted") is None, "a script of the notes must not run"
    assert not [url for url in asked if "evil" in url], f"{asked=}"


@pytest.mark.long
def test_long_and_deep_markdown_keeps_the_page_alive(
    master: Any, noted: Any, open_page: Any
) -> None:
    """A million characters of brackets, quotes and stars: the first part is shown, one types on."""
    noted.edit(notes="[" * 30_000 + ">" * 30_000 + "*a_" * 100_000)
    page = open_page(master, f"/experiments/{noted.id}/notes")
    expect(page.get_by_text("Only the first 100,000 characters are shown")).to_be_visible()
    field = page.get_by_role("textbox", name="Notes", exact=True)
    field.fill("short")
    shown = page.get_by_role("region", name="Notes as they are shown")
    expect(shown).to_have_text("short")
