"""The cases of `run.py` about the web UI, measured in a browser: `make ui browser` first."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import Figure

from paceline.client import Client
from paceline.client._http_session import read_master_file

_HERE = Path(__file__).parent
_NUM_ROUNDS = 5
_HEAP_S = float(os.environ.get("PACELINE_BENCH_HEAP_S", "600"))
_WARM_UP_S = 20.0
_NUM_LIVE = 16
_RATE = 10.0
_LONG_TASK_MS = 50.0


def measure_webui() -> list[Figure]:
    """First view, long series, and frames while one zooms, pans and scrolls."""
    from webui_data import fill_home

    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        found = fill_home(home)
        with _master(home) as client, _browser() as browser:
            rounds = [_one_round(browser, client, found) for _ in range(_NUM_ROUNDS)]
    values = {name: [one[name] for one in rounds] for name in rounds[0]}
    what = {
        "first": ("first view of a warm server, 10,000 experiments", "s", 0.5),
        "size": ("JavaScript of the first page, compressed", "KB", 250.0),
        "long": ("a series of 1,000,000 points, click to paint", "s", 0.3),
        "wide": ("100 series of 100,000 points, click to paint", "s", 1.0),
        "zoom": ("script time of a frame, zooming and panning, p95", "ms", 10.0),
        "scroll": ("script time of a frame, scrolling 10,000 rows, p95", "ms", 10.0),
        "grouped": ("1,000 runs in 5 groups of Compare, address to paint", "s", 2.0),
        "panels": ("first panels of 200 metrics of 50 runs, list to paint", "s", 0.5),
        "tasks": (f"tasks of {_LONG_TASK_MS:.0f} ms and more, of 100 frames", "", 1.0),
    }
    return [
        Figure(what=text, unit=unit, values=values[name], bar=bar)
        for name, (text, unit, bar) in what.items()
    ]


def measure_webui_heap() -> list[Figure]:
    """The page's memory while 16 runs report ten times a second each."""
    with tempfile.TemporaryDirectory() as directory:
        runs = Path(directory) / "runs"
        runs.mkdir()
        command = [sys.executable, _HERE / "webui_data.py", runs, str(_NUM_LIVE), str(_RATE)]
        writer = subprocess.Popen([str(part) for part in command])
        try:
            with _master(Path(directory) / "home", "--runs", runs) as client:
                while len(client.list_experiments()) < _NUM_LIVE:
                    time.sleep(0.1)
                with _browser() as browser:
                    sizes = _heap_sizes(browser, client)
        finally:
            writer.send_signal(signal.SIGTERM)
            writer.wait()
    rate = f"{_NUM_LIVE} runs, {_RATE:g} reports/s each"
    return [
        Figure(what=f"heap growth in {_HEAP_S:.0f} s of a live page, {rate}", unit="MB",
               values=[sizes[-1] - sizes[0]], bar=20.0, raw=sizes,
               beside=f"heap at the end: {sizes[-1]:.1f} MB")
    ]  # fmt: skip


def measure_webui_large() -> list[Figure]:
    """Views of a home with many trials, and a search of which each trial is a point."""
    from large_store import fill_home

    figures = []
    for num_trials in (100_000, 30_010):
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory) / "home"
            store = fill_home(home, num_trials=num_trials, num_lines=1000)
            with _master(home) as client, _browser() as browser:
                rounds = [_one_look(browser, client, store.wide) for _ in range(_NUM_ROUNDS)]
        if num_trials == 100_000:
            text = "first view of a warm server, 100,000 trials"
            figures.append(
                Figure(what=text, unit="s", values=[first for first, _, _ in rounds], bar=1.0)
            )
            continue
        for place, name in ((1, "rungs"), (2, "hyperparameters")):
            text = f"{name} of a search of 15,005 trials, address to paint"
            values = [one[place] for one in rounds]
            figures.append(Figure(what=text, unit="s", values=values, bar=1.5))
    return figures


def measure_webui_tabs() -> list[Figure]:
    """Each of 20 tabs of one browser, all left open, of which all but the newest are hidden."""
    from webui_data import fill_home

    sys.path.insert(0, str(_HERE.parent / "tests" / "webui"))
    from test_tabs import Tabs

    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        found = fill_home(home)
        # The heading of a section, rows, and charts.
        pages = {
            "/": "document.body?.innerText?.includes('Recently ended')",
            "/experiments": "document.querySelectorAll('main a').length > 10",
            f"/experiments/{found['wide']}": "document.querySelector('main canvas') !== null",
            f"/trials/{found['long']}": "document.querySelector('main canvas') !== null",
            "/cluster": "document.querySelector('main h1') !== null",
        }
        with _master(home) as client, _browser(hides_tabs=True) as browser:
            tabs = Tabs(browser, client)
            tabs.open("/")
            tabs.wait_ms(5000)
            seconds = [_shown_s(tabs, path, pages[path]) for path in [*pages] * 4]
            tabs.close()
    text = "a page in each of 20 tabs, address to paint"
    beside = f"the slowest: {max(seconds):.2f} s"
    return [Figure(what=text, unit="s", values=seconds, bar=1.0, beside=beside)]


def _shown_s(tabs: Any, path: str, shown: str) -> float:
    """Open a page in a new tab; return the seconds until what is `shown` is painted."""
    script = f"""{{
        const look = () => requestAnimationFrame(
            () => {shown} ? setTimeout(() => (window.shownMs = performance.now())) : look()
        );
        look();
    }}"""
    tab = tabs.open(path, script)
    while not (shown_ms := tab.evaluate("window.shownMs ?? 0")):
        tabs.wait_ms(50)
    return float(shown_ms) / 1000


def _one_look(browser: Any, client: Client, wide: int) -> tuple[float, float, float]:
    page = _open(browser, client, None)
    first = _first_view(page)
    rungs = _went(page, f"/experiments/{wide}/search", "main li[data-decision]")
    space = _went(page, f"/experiments/{wide}/hyperparameters", "main canvas")
    page.context.close()
    return first, rungs, space


def _first_view(page: Any) -> float:
    began = time.perf_counter()
    page.goto("/", wait_until="commit")
    page.get_by_role("heading", name="Recently ended").wait_for()
    return time.perf_counter() - began


def _heap_sizes(browser: Any, client: Client) -> list[float]:
    """Return the heap in MB after forced collections, from warm to the end."""
    page = _open(browser, client, "/")
    ids = [one.trials()[0].id for one in client.list_experiments()]
    page.goto(f"/compare?trials={json.dumps(ids)}&metric=training%2Floss")
    page.locator("[role=img][aria-label^='loss: 16 lines']").wait_for()
    devtools = page.context.new_cdp_session(page)
    began, sizes = time.monotonic(), []
    page.wait_for_timeout(_WARM_UP_S * 1000)
    while not sizes or time.monotonic() < began + _WARM_UP_S + _HEAP_S:
        devtools.send("HeapProfiler.collectGarbage")
        sizes.append(devtools.send("Runtime.getHeapUsage")["usedSize"] / 1e6)
        page.wait_for_timeout(min(30.0, _HEAP_S / 4) * 1000)
    page.context.close()
    return sizes


def _one_round(browser: Any, client: Client, found: dict[str, int]) -> dict[str, float]:
    page = _open(browser, client, None)
    measured = {"first": _first_view(page)}
    measured["size"] = page.evaluate(
        "() => performance.getEntriesByType('resource').filter((one) => one.name.endsWith('.js'))"
        ".reduce((sum, one) => sum + one.encodedBodySize, 0) / 1000"
    )
    page.goto("/experiments?q=long")
    page.get_by_role("link", name="long").click()
    page.get_by_role("link", name="Trials 1").click()
    link = f"a[href='/trials/{found['long']}']"
    measured["long"] = _painted(page, link, "wave: 1 line")
    page.goto("/experiments?q=wide")
    measured["wide"] = _painted(
        page, f"a[href='/experiments/{found['wide']}']", "Learning curves: loss: 100 lines"
    )
    frames, tasks = _zoom(page)
    measured["zoom"] = _percentile(frames, 0.95)
    page.goto("/experiments")
    page.get_by_role("table").get_by_role("link").first.wait_for()
    scrolled, more = _scroll(page)
    measured["scroll"] = _percentile(scrolled, 0.95)
    group = "group=%5B%22*%22%5D"
    measured["grouped"] = _compared(page, f"experiments=[{found['grouped']}]&{group}", "loss: 5")
    measured["panels"] = _compared(page, f"experiments=[{found['many']}]", "layer000: 50")
    measured["tasks"] = 100 * (len(tasks) + len(more)) / (len(frames) + len(scrolled))
    page.context.close()
    return measured


def _compared(page: Any, search: str, label: str) -> float:
    """Go to a comparison; return the seconds until its first panel is painted."""
    return _went(page, f"/compare?{search}", f"[role=img][aria-label^='{label}'] canvas")


def _went(page: Any, path: str, shown: str) -> float:
    """Go to an address within the app; return the seconds until what is `shown` is painted."""
    page.goto("/cluster")
    page.get_by_role("heading", name="Cluster").wait_for()
    # The code of all pages is there before a person goes on.
    page.wait_for_timeout(2000)
    script = """async ([path, shown]) => {
        history.pushState(null, '', path);
        dispatchEvent(new Event('popstate'));
        return paceline.until(() => document.querySelector(shown) !== null);
    }"""
    return float(page.evaluate(script, [path, shown])) / 1000


def _painted(page: Any, link: str, label: str) -> float:
    """Click a link and return the seconds until a chart of that label is painted."""
    page.locator(link).first.wait_for()
    script = """async ([link, label]) => {
        document.querySelector(link).click();
        return paceline.until(
            () => document.querySelector(`[role=img][aria-label^="${label}"] canvas`) !== null
        );
    }"""
    return float(page.evaluate(script, [link, label])) / 1000


def _zoom(page: Any) -> tuple[list[float], list[float]]:
    """Move over a chart, zoom into it three times, and take that back."""
    box = page.locator("[role=img][aria-label^='Learning curves'] .u-over").bounding_box()
    left, top, width = box["x"], box["y"] + box["height"] / 2, box["width"]
    page.evaluate("() => paceline.begin()")
    for _ in range(3):
        for part in range(40):
            page.mouse.move(left + width * part / 40, top + part)
        page.mouse.move(left + width * 0.2, top)
        page.mouse.down()
        for part in range(20):
            page.mouse.move(left + width * (0.2 + 0.03 * part), top)
        page.mouse.up()
        page.wait_for_timeout(400)
    page.mouse.dblclick(left + width / 2, top)
    page.wait_for_timeout(400)
    told = page.evaluate("() => paceline.end()")
    return told["frames"], told["tasks"]


def _scroll(page: Any) -> tuple[list[float], list[float]]:
    page.get_by_role("region", name="Experiments").hover()
    page.evaluate("() => paceline.begin()")
    for _ in range(120):
        page.mouse.wheel(0, 400)
        page.wait_for_timeout(16)
    told = page.evaluate("() => paceline.end()")
    return told["frames"], told["tasks"]


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@contextmanager
def _master(home: Path, *options: object) -> Iterator[Client]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment = {**kept, "PACELINE_HOME": str(home)}
    command = [sys.executable, "-m", "paceline.cli"]
    up = [*command, "up", "--detach", "--port", "0", "--slots", "1", *map(str, options)]
    subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        file = read_master_file(home)
        assert file is not None
        with Client(file.url, (home / "token").read_text().strip()) as client:
            yield client
    finally:
        subprocess.run([*command, "down"], env=environment, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def _browser(*, hides_tabs: bool = False) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    names = ["chromium", "chromium-browser", "google-chrome"]
    # The shell takes less processor time, and shows no tab as hidden.
    names[:0] = [] if hides_tabs else ["chromium-headless-shell"]
    path = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        yield browser
        browser.close()


def _open(browser: Any, client: Client, path: str | None) -> Any:
    """Return a page of a signed-in browser with nothing cached."""
    context = browser.new_context(base_url=client.url, viewport={"width": 1280, "height": 800})
    context.request.get(client.sign_in_link())
    context.add_init_script(path=_HERE / "webui_page.js")
    page = context.new_page()
    if path is not None:
        page.goto(path)
    return page


NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {
    "webui": measure_webui,
    "webui-heap": measure_webui_heap,
    "webui-large": measure_webui_large,
    "webui-tabs": measure_webui_tabs,
}
