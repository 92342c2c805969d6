"""Media in a browser: each kind, step by step, of many, and of strangers."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline.client._code_and_run_uploads import RunSync

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

ACT = "top.document.title = 'acted'; parent.postMessage('acted', '*'); acted = true;"
SVG = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40" onload="{ACT}">'
    f'<script>{ACT}</script><rect width="40" height="40"/></svg>'
)
PAGE = f"<h1>A report</h1><script>{ACT}</script><img src=/api/v1/master onerror='{ACT}'>"
CELL = f'<img src=x onerror="{ACT}">'


def png(width: int, height: int) -> bytes:
    """Return a black PNG of one bit per pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    row = bytes(1 + (width + 7) // 8)
    deflate = zlib.compressobj()
    rows = [deflate.compress(row) for _ in range(height)]
    data = b"".join([*rows, deflate.flush()])
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


class FigureOfPlotly:
    """What has the methods of a Plotly figure that are called."""

    def __init__(self, *traces: dict[str, Any], **layout: Any) -> None:
        self._figure = {"data": traces, "layout": layout}

    def to_plotly_json(self) -> dict[str, Any]:
        return self._figure

    def to_json(self) -> str:
        return json.dumps(self._figure)


@pytest.fixture
def report(
    master: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[[Any], None]], int]:
    """Return a function that sends what another one reports, and returns the trial's id."""
    monkeypatch.chdir(tmp_path)

    def send(name: str, tell: Callable[[Any], None]) -> int:
        with core.init(name=name) as context:
            tell(context.train)
        RunSync(master.client, context.run_dir).send()
        (found,) = master.client.list_experiments(limit=1)
        return int(found.trials()[0].id)

    return send


def panel(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


@pytest.mark.long
def test_each_kind_is_shown_and_nothing_of_a_stranger_acts(
    master: Any, report: Any, open_page: Any, tmp_path: Path
) -> None:
    for name, content in (("a.png", png(20, 20)), ("b.svg", SVG.encode()), ("w.bin", b"x" * 2048)):
        (tmp_path / name).write_bytes(content)

    def tell(train: Any) -> None:
        train.report_image(1, "drawn", ["a.png", "b.svg"], captions=["a seven", CELL])
        train.report_audio(1, "tone", [0.0, 0.5] * 4000, sample_rate=8000)
        rows = [{"file": f"{i}.png", "loss": i / 10, "note": CELL} for i in range(500)]
        train.report_table(1, "errors", rows)
        train.report_text(1, "said", CELL)
        train.report_html(1, "page", PAGE)
        trace = {"type": "heatmap", "z": [[1, 2]], "text": CELL, "hovertemplate": CELL}
        train.report_figure(1, "figure", FigureOfPlotly(trace, title={"text": CELL}))
        train.report_figure(1, "surface", FigureOfPlotly({"type": "surface", "z": [[1]]}))
        train.report_histogram(1, "weights", [0.0, 1.0, 1.0], num_bins=2)
        train.report_file(1, "files/model", "w.bin")

    trial = report("all-kinds-of-media", tell)
    page = open_page(master, f"/trials/{trial}", viewport={"width": 1280, "height": 5000})
    page.get_by_role("link", name="Media", exact=True).click()
    # The figure, drawn in its frame by code without an origin.
    frame = page.frame_locator("iframe[title^='figure']")
    expect(frame.locator(".main-svg").first).to_be_visible()
    expect(panel(page, "surface")).to_contain_text("traces of the type surface")
    expect(page.frame_locator("iframe[title^='page']").get_by_text("A report")).to_be_visible()
    expect(panel(page, "page")).to_contain_text("Scripts of this page do not run here")
    for image in panel(page, "drawn").get_by_role("img").all():
        expect(image).to_have_js_property("complete", True)
        expect(image).not_to_have_js_property("naturalWidth", 0)
    expect(panel(page, "said").get_by_text(CELL)).to_be_visible()
    expect(panel(page, "tone").locator("audio")).to_have_js_property("duration", 1)
    expect(panel(page, "weights").get_by_role("img", name="3 values from 0 to 1")).to_be_visible()
    expect(panel(page, "files/model")).to_contain_text("2.0 KiB")
    with page.expect_download() as download:
        panel(page, "files/model").get_by_role("link", name="Download").click()
    assert download.value.path().read_bytes() == b"x" * 2048
    # Rows far down are not drawn before they are in sight; sorting and filter take all.
    table = panel(page, "errors")
    assert table.get_by_role("row").count() < 60
    expect(table.get_by_text(CELL).first).to_be_attached()
    for _ in range(2):
        table.get_by_role("button", name="loss").click()
    expect(table.get_by_role("row").nth(1)).to_contain_text("49.9")
    table.get_by_role("textbox", name="Filter the rows").fill("123.PNG")
    expect(table.get_by_text("1 of 500 rows")).to_be_visible()
    expect(table.get_by_role("row").nth(1)).to_contain_text("12.3")
    # Enlarged by keyboard, and on to the next.
    page.get_by_role("button", name="Enlarge a seven").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="a seven")
    expect(dialog.get_by_text("1 of 2")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("dialog").get_by_text("2 of 2")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    for each in page.frames:
        if "srcdoc" not in each.url:
            assert each.evaluate("typeof acted") == "undefined", each.url
    expect(page).to_have_title(f"Trial {trial} · Paceline")
    # What is opened by itself has no origin either.
    page.goto("/figure.html", wait_until="commit")
    assert page.evaluate("origin") == "null"


@pytest.mark.long
def test_sliders_choose_steps_and_new_media_appear(
    master: Any, report: Any, open_page: Any, tmp_path: Path
) -> None:
    def tell(train: Any) -> None:
        for step in (10, 20, 30):
            train.report_text(step, "a/said", f"said at {step}")
            train.report_histogram(step, "a/weights", [0.0, float(step)], num_bins=4)
        train.report_text(15, "a/once", "once at 15")

    with core.init(name="media-step-by-step") as context:
        tell(context.train)
        RunSync(master.client, context.run_dir).send()
        (found,) = master.client.list_experiments(limit=1)
        page = open_page(master, f"/trials/{found.trials()[0].id}/media")
        said = panel(page, "a/said")
        expect(said.get_by_text("said at 30")).to_be_visible()
        expect(page.get_by_role("img", name="a/weights over 3 steps")).to_be_visible()
        # The keys of a slider lead from step to step; one for all moves all.
        page.get_by_role("slider", name="Step of a/said").press("ArrowLeft")
        expect(said.get_by_text("said at 20")).to_be_visible()
        page.get_by_role("slider", name="Step of all media").press("Home")
        expect(said.get_by_text("said at 10")).to_be_visible()
        expect(panel(page, "a/once")).to_contain_text("Nothing up to step 10; the first is of")
        page.reload()
        expect(said.get_by_text("said at 10")).to_be_visible()
        page.get_by_role("slider", name="Step of all media").press("End")
        expect(said.get_by_text("said at 30")).to_be_visible()
        expect(panel(page, "a/once").get_by_text("once at 15")).to_be_visible()
        expect(page.get_by_role("banner").get_by_role("status")).to_have_text("Live")
        context.train.report_text(40, "a/said", "said at 40")
        context.train.report_text(40, "b/new", "a new name")
        RunSync(master.client, context.run_dir).send()
        expect(said.get_by_text("said at 40")).to_be_visible()
        panel(page, "b/new").scroll_into_view_if_needed()
        expect(panel(page, "b/new").get_by_text("a new name")).to_be_visible()


@pytest.mark.long
def test_of_300_names_and_2000_steps_only_what_is_in_sight_is_read(
    master: Any, report: Any, open_page: Any
) -> None:
    def tell(train: Any) -> None:
        for step in range(2000):
            train.report_text(step, "long", f"text {step} of the long one")
        for i in range(300):
            train.report_text(1, f"many/name{i:03}", f"one of {i}")

    trial = report("very-many-media", tell)
    page = open_page(master, f"/trials/{trial}")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/media?" in request.url else 0)
    page.get_by_role("link", name="Media", exact=True).click()
    expect(page.get_by_text("301 names")).to_be_visible()
    expect(panel(page, "long").get_by_text("text 1999 of the long one")).to_be_visible()
    page.get_by_role("slider", name="Step of long").press("Home")
    expect(panel(page, "long").get_by_text("text 0 of the long one")).to_be_visible()
    assert 0 < len(asked) < 40
    last = panel(page, "many/name299")
    expect(last).to_be_attached()
    last.scroll_into_view_if_needed()
    expect(last.get_by_text("one of 299")).to_be_visible()
    assert len(asked) < 120
    page.get_by_role("textbox", name="Filter the media").fill("name14 many")
    expect(page.get_by_text("10 of 301 names")).to_be_visible()


@pytest.mark.long
def test_a_file_that_is_gone_and_a_huge_image_leave_the_page_whole(
    master: Any, report: Any, open_page: Any, tmp_path: Path
) -> None:
    (tmp_path / "huge.png").write_bytes(png(20_000, 20_000))
    (tmp_path / "gone.png").write_bytes(png(33, 33))

    def tell(train: Any) -> None:
        # As a file it tells no number of pixels.
        train.report_file(1, "huge", "huge.png")
        train.report_image(1, "gone", "gone.png")
        train.report_table(1, "gone table", [{"only": "here"}])
        train.report_text(1, "said", "still here")

    trial = report("gone-and-huge", tell)
    files = master.client.get_trial(trial).files()
    for file in files:
        if "gone" in file.path:
            (master.home / "files" / file.digest[:2] / file.digest).unlink()
    page = open_page(master, f"/trials/{trial}/media")
    expect(panel(page, "huge")).to_contain_text("20,000 x 20,000 pixels")
    expect(panel(page, "huge").get_by_role("button", name="Show huge")).to_be_visible()
    expect(panel(page, "huge").get_by_role("img")).to_have_count(0)
    expect(panel(page, "gone")).to_contain_text("its file is missing or damaged")
    expect(panel(page, "gone table").get_by_role("alert")).to_contain_text("There is no file")
    expect(panel(page, "said").get_by_text("still here")).to_be_visible()


@pytest.mark.long
def test_images_of_several_trials_stand_side_by_side(
    master: Any, report: Any, open_page: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png(20, 20))

    def tell(train: Any, steps: tuple[int, ...]) -> None:
        for step in steps:
            train.report_image(step, "val/sample", "a.png", captions=f"sample at {step}")
            train.report_text(step, "said", f"said at {step}")

    trials = [
        report("side-one", lambda train: tell(train, (5, 10))),
        report("side-two", lambda train: tell(train, (5, 7))),
        report("side-none", lambda train: train.report_text(1, "other", "text")),
    ]
    page = open_page(master, f"/compare?view=media&trials={trials}".replace(" ", ""))
    both = page.get_by_role("region", name="Media side by side")
    expect(both.get_by_role("img", name="sample at 10")).to_be_visible()
    expect(both.get_by_role("img", name="sample at 7")).to_be_visible()
    expect(both.get_by_text("2 of the first 3 trials reported val/sample.")).to_be_visible()
    page.get_by_role("slider", name="Step of the media").press("Home")
    expect(both.get_by_role("img", name="sample at 5")).to_have_count(2)
    page.get_by_role("combobox", name="Media").click()
    page.get_by_role("option", name="said (training, text)").click()
    expect(both.get_by_text("said at 10")).to_be_visible()
    expect(both.get_by_text("said at 7")).to_be_visible()


def test_a_trial_without_media_says_how_to_report_some(
    master: Any, report: Any, open_page: Any
) -> None:
    trial = report("no-media-at-all", lambda train: train.report_training_metrics(1, {"a": 1.0}))
    page = open_page(master, f"/trials/{trial}/media")
    expect(page.get_by_role("heading", name="No media")).to_be_visible()
    expect(page.get_by_text("context.train.report_image")).to_be_visible()
