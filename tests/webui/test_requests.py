"""Requests of pages: when they are sent, and how many."""

import time
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

REPORT = """
import paceline

with paceline.core.init() as context:
    context.train.report_validation_metrics(1, {"test_loss": 1.0})
"""


@pytest.mark.long
def test_what_pages_show_is_read_before_their_code_is_there(
    master: Any, open_page: Any, go_on: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REPORT)
    experiment = master.create(tmp_path, name="early")
    assert experiment.wait(0.1).value == "COMPLETED"
    (trial,) = experiment.trials()
    page = open_page(master, loads_ahead=True)
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    for code, path, asked, heading in (
        ("TrialPage", f"/trials/{trial.id}", f"trials/{trial.id}", f"Trial {trial.id}"),
        ("Compare", f"/compare?trials=[{trial.id}]", "metric-names", "Compare trials"),
    ):
        page.route(f"**/assets/{code}-*.js", hold)
        page.goto("/cluster")
        expect(page.get_by_role("heading", name="Cluster")).to_be_visible()
        with page.expect_request(f"**/api/v1/{asked}"):
            go_on(page, path)
        expect(page.get_by_role("heading", name=heading)).to_have_count(0)
        while held:
            held.pop().continue_()
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
        page.unroute(f"**/assets/{code}-*.js")


@pytest.mark.long
def test_a_page_asks_for_everything_once(master: Any, open_page: Any, tmp_path: Path) -> None:
    """Code that is read early and the page itself share an answer; so do parts of a page."""
    (tmp_path / "train.py").write_text(REPORT)
    experiment = master.create(tmp_path, name="once")
    assert experiment.wait(0.1).value == "COMPLETED"
    (trial,) = experiment.trials()
    # What has happened in the last seconds is told to a new page, which reads it again.
    time.sleep(6)
    page = open_page(master, "/sign-in", loads_ahead=True)
    asked: list[str] = []
    page.on(
        "request",
        lambda one: (
            asked.append(f"{one.method} {one.url} {one.post_data}")
            if "/api/" in one.url and "/events" not in one.url
            else None
        ),
    )
    for path in (
        "/", "/experiments", f"/experiments/{experiment.id}",
        f"/experiments/{experiment.id}/trials", f"/trials/{trial.id}", "/compare", "/cluster",
    ):  # fmt: skip
        page.goto("about:blank")
        asked.clear()
        page.goto(f"{master.url}{path}")
        page.wait_for_load_state("networkidle")
        twice = {one for one in asked if asked.count(one) > 1}
        assert not twice, f"{path} asks twice for {twice}"
