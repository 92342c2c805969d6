"""Pages that stay open: long series, runs without a master, and a master that is restarted."""

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._base.run_directory import RunInfo
from paceline._cluster.master.home_directory import Home
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.series_reader import Points
from paceline._cluster.master.store.series_writer import store_columns

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

NUM_POINTS = 1_000_000
SPIKE = 654_321
SAMPLINGS = {"often": 10, "seldom": 200}


def wave() -> list[float]:
    """Return a long series in which one point stands out."""
    values = [float(n % 1000) for n in range(NUM_POINTS)]
    values[SPIKE] = 5000.0
    return values


def ripple(step: int) -> float:
    """Return a long wave with short ones on it."""
    return math.cos(step / 150_000) + 0.2 * math.sin(step / 900)


def store_long_series(home: Path) -> int:
    """Store a run with long series, and return its trial.

    In one of them a point stands out; two are one function, reported more and less often.
    """
    prepared = Home(home)
    prepared.prepare()
    master = Master(prepared, ["cpu"])
    info = RunInfo(run_id="long", name="long", created=1.0, checkpoint_storage=str(home / "c"))
    steps = list(range(NUM_POINTS))
    points = Points(steps, [float(n) for n in steps], wave())

    def store(transaction: Any) -> int:
        trial = master.unmanaged.register(transaction, info, str(home / "long")).trial_id
        columns = {("training", "wave"): points}
        for name, period in SAMPLINGS.items():
            at = list(range(0, NUM_POINTS, period))
            columns["training", name] = Points(at, [float(n) for n in at], [*map(ripple, at)])
        store_columns(transaction.connection, trial, 1, columns)
        return trial

    trial: int = master.database.write(store).result()
    master.database.close()
    return trial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for scripts that run without a master."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def own(project: Path, master_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a master of the module's own, which knows a long series and watches the project."""
    home = tmp_path_factory.mktemp("own")
    trial = store_long_series(home)
    started = master_of(home, "--slots", 1, "--runs", project / "paceline_runs")
    started.long_trial = trial
    yield started
    started.stop()


@pytest.mark.slow
def test_a_million_points_keep_their_extremes_and_refine_on_zoom(
    own: Any, open_page: Any, scroll_to: Any
) -> None:
    page = open_page(own, f"/trials/{own.long_trial}")
    chart = page.get_by_role("img", name=re.compile("^wave: 1 line"))
    scroll_to(chart)
    expect(chart).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download wave").click()
        page.get_by_role("menuitem", name="CSV").click()
    assert download.value.suggested_filename == "wave.csv"
    header, *rows = Path(download.value.path()).read_text().splitlines()
    # The page draws some of the points, the file has all of them.
    assert header == "series,batches,value"
    name = f"{own.long_trial}/training/wave"
    assert rows == [f"{name},{n},{value}" for n, value in enumerate(wave())]
    # The address holds the zoom, so a link shows the same part: here every point of it.
    page.goto(f"/trials/{own.long_trial}?table=true&from={SPIKE - 2}&to={SPIKE + 2}")
    table = page.get_by_role("table", name="wave")
    scroll_to(table)
    for step in (SPIKE - 2, SPIKE - 1, SPIKE + 1, SPIKE + 2):
        row = table.get_by_role("row").filter(has_text=f"{step:,}")
        expect(row.get_by_role("cell").last).to_have_text(str(step % 1000))


@pytest.mark.long
def test_smoothing_is_by_steps_whatever_is_drawn(
    own: Any, open_page: Any, go_on: Any, unfold: Any
) -> None:
    page = open_page(own, f"/trials/{own.long_trial}")
    chart = page.get_by_role("img", name=re.compile("^often: 1 line"))
    expect(chart).to_be_visible()
    await_faint_share(chart, lambda share: share < 0.2)
    # Each press draws all charts.
    go_on(page, f"/trials/{own.long_trial}?smooth=0.57")
    unfold(page)
    expect(page.get_by_text("Smoothing 0.57")).to_be_visible()
    page.get_by_role("slider").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.get_by_text("Smoothing 0.60")).to_be_visible()
    expect(page.get_by_text("reported values are faint").first).to_be_visible()
    # The lines of what was reported, behind the line of averages.
    await_faint_share(chart, lambda share: share > 0.4)
    averages = []
    for begin in (999_000, 0):
        page.goto(f"/trials/{own.long_trial}?smooth=0.6&table=true&from={begin}&to=999999")
        for name, last in (("often", 999_990), ("seldom", 999_800)):
            row = page.get_by_role("table", name=name).get_by_role("row")
            cells = row.filter(has_text=f"{last:,}").get_by_role("cell")
            expect(cells.last).to_have_text(re.compile(r"\d"))
            reported, average = map(float, cells.all_inner_texts()[2:])
            assert reported == pytest.approx(ripple(last), abs=1e-6)
            averages.append(average)
    # Neither how much is drawn nor how often it was reported changes the average.
    assert abs(ripple(999_990) - math.cos(999_990 / 150_000)) > 0.1
    assert averages[0] == averages[2]
    assert averages[1] == averages[3]
    assert averages[0] == pytest.approx(averages[1], abs=0.002)


def await_faint_share(chart: Any, is_right: Callable[[float], bool]) -> None:
    """Wait until a chart is drawn, and drawn so; nothing drawn is no share."""
    for _ in range(600):
        if is_right(share := faint_share(chart)):
            return
        chart.page.wait_for_timeout(100)
    raise AssertionError(share)


def faint_share(chart: Any) -> float:
    """Return the share of a chart's drawn pixels through which the page shines."""
    share: float = chart.locator("canvas").evaluate("""(canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let drawn = 0, faint = 0;
        for (let i = 3; i < data.length; i += 4) {
            if (data[i] > 0) drawn += 1;
            if (data[i] > 0 && data[i] < 120) faint += 1;
        }
        return faint / drawn;
    }""")
    return share


@pytest.mark.long
def test_dragging_over_a_chart_zooms_and_back_takes_it_back(own: Any, open_page: Any) -> None:
    page = open_page(own, f"/trials/{own.long_trial}")
    # What is drawn later would move the chart.
    for name in ("often", "seldom", "wave"):
        chart = page.get_by_role("img", name=re.compile(f"^{name}: 1 line"))
        expect(chart).to_be_visible()
        # Below it are more.
        chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 120, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d+.*to=\d+"))
    expect(page.get_by_role("button", name="Show all")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("button", name="Show all")).to_be_hidden()
    expect(chart).to_be_visible()


def test_a_finger_zooms_sideways_and_scrolls_up_and_down(own: Any, open_page: Any) -> None:
    page = open_page(own, f"/trials/{own.long_trial}", has_touch=True)
    chart = page.get_by_role("img", name=re.compile("^often: 1 line"))
    expect(chart).to_be_visible()
    devtools = page.context.new_cdp_session(page)

    def swipe(across: float, down: float) -> None:
        box = chart.bounding_box()
        x, y = box["x"] + box["width"] * 0.5, box["y"] + 120
        for n in range(11):
            at = [{"x": x + n / 10 * across, "y": y + n / 10 * down}]
            kind = "touchMove" if n else "touchStart"
            devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})
        devtools.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    swipe(0, -100)
    page.wait_for_function("scrollY > 50")
    expect(page.get_by_role("button", name="Show all")).to_have_count(0)
    swipe(90, 5)
    expect(page).to_have_url(re.compile(r"from=\d+.*to=\d+"))
    expect(page.get_by_role("button", name="Show all")).to_be_visible()


def test_a_restarted_master_shows_nothing_twice(
    own: Any, open_page: Any, code: Path, unfold: Any
) -> None:
    experiment = own.create(code)
    page = open_page(own, f"/experiments/{experiment.id}/logs")
    log = page.get_by_role("log")
    line = log.get_by_text("is done").first
    expect(line).to_be_visible()
    own.stop("--keep-trials")
    connection = page.get_by_role("banner").get_by_role("status")
    expect(connection).to_have_text("No connection")
    # What was shown stays; the script trains on meanwhile.
    expect(line).to_be_visible()
    own.start()
    expect(connection).to_have_text("Live")
    (trial,) = experiment_of(own, experiment.id).trials()
    (code / "finish").touch()
    expect(page.locator("header").get_by_text("Completed")).to_be_visible()
    last = experiment_of(own, experiment.id).trials()[0].data.steps_completed
    expect(log.get_by_text(f"batch {last} is done", exact=True)).to_be_visible()
    shown = page.get_by_role("status").filter(has_text=re.compile(r"^[\d,]+ lines?$"))
    printed = [line for line in trial.iter_logs() if "is done" in line.text]
    assert [line.text for line in printed] == [f"batch {n} is done" for n in range(1, last + 1)]
    expect(shown).to_have_text(f"{len(list(trial.iter_logs()))} lines")
    page.get_by_role("link", name="Overview").click()
    unfold(page)
    page.get_by_role("switch", name="As tables").click()
    steps = page.get_by_role("table", name="Learning curves").locator("tbody td:nth-child(2)")
    expect(steps).to_have_text([str(n) for n in range(1, last + 1)])


@pytest.mark.long
def test_a_run_without_a_master_is_shown_live(
    own: Any, open_page: Any, code: Path, project: Path
) -> None:
    page = open_page(own, "/experiments")
    with subprocess.Popen(
        [sys.executable, code / "train.py"], cwd=project, env={}, stdout=subprocess.DEVNULL
    ) as process:
        try:
            page.get_by_role("link", name="train").click()
            expect(page.get_by_text("a run made without a master")).to_be_visible()
            expect(page.locator("header").get_by_text("Running")).to_be_visible()
            expect(page.get_by_role("button", name="Pause")).to_have_count(0)
            # Nothing says what is searched or how long it goes on, so the page does not either.
            facts = page.locator("dl")
            expect(facts.get_by_text("Batches")).to_be_visible()
            for unknown in ("Progress", "Best", "Search"):
                expect(facts.get_by_text(unknown)).to_have_count(0)
            page.get_by_role("link", name="Logs").click()
            expect(page.get_by_text("stays where it was started")).to_be_visible()
            page.get_by_role("link", name="Trials 1").click()
            page.get_by_role("table").get_by_role("link").click()
            expect(page.get_by_role("img", name=re.compile("^loss: 2 lines"))).to_be_visible()
        finally:
            (project / "finish").touch()
        assert process.wait(60) == 0
    expect(page.locator("header").get_by_text("Completed")).to_be_visible()


def experiment_of(master: Any, experiment: int) -> Any:
    """Return an experiment as it is now, also after a restart."""
    return master.client.get_experiment(experiment)
