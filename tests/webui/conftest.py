"""A real master with a real browser in front of it."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.api.web_ui_files import ASSETS_PATH
from paceline.client import Client, Experiment
from paceline.client._http_session import read_master_file

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
# The theme and width that pages have unless a test says otherwise: `dark-1440` tries all tests so.
_LOOK = os.environ.get("PACELINE_TEST_LOOK", "light-1280").split("-")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# It takes a third of the processor time, and shows no tab as hidden.
_SHELL = "chromium-headless-shell"
_PATIENCE_MS = 60_000
AXE = Path(__file__).parents[2] / "webui/node_modules/axe-core/axe.min.js"
WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]

# Else each page loads and compiles the code of all others, which takes as long as all it shows.
_SAVE_DATA = "Object.defineProperty(navigator.connection, 'saveData', {value: true})"

# Trains until a file `finish` appears beside it, so that a test decides how long it takes.
STEADY = """
import math
import time
from pathlib import Path

import paceline

with paceline.core.init() as context:
    info = paceline.get_cluster_info()
    rate = info.trial.hparams["learning_rate"] if info else 0.02
    done = 0
    if context.latest_checkpoint:
        done = context.checkpoint.get_metadata(context.latest_checkpoint)["steps_completed"]
        print(f"goes on after batch {done}", flush=True)
    for batch in range(done + 1, 1_000_000):
        loss = math.exp(-rate * batch) + 0.1
        epoch = batch / 10
        context.train.report_training_metrics(batch, {"train_loss": loss, "epoch": epoch})
        context.train.report_validation_metrics(batch, {"test_loss": loss + 0.1, "epoch": epoch})
        print(f"batch {batch} is done", flush=True)
        is_over = Path("finish").exists() or context.preempt.should_preempt()
        if is_over or batch % 10 == 0:
            with context.checkpoint.store_path({"steps_completed": batch}) as (path, _):
                (path / "state.txt").write_text(f"{batch}")
        if is_over:
            break
        # Browsers draw each report.
        time.sleep(0.4)
"""


class MasterProcess:
    """A master that `paceline up` started, its home, and a client of it.

    Args:
        servers: What masters are forked from, and commands.
        home: Its home.
        options: Those of `paceline up`.
        port: Its port.
    """

    def __init__(
        self, servers: tuple[Any, Any], home: Path, *options: object, port: int = 0
    ) -> None:
        self._masters, self._commands = servers
        self.home = home
        self._options = options
        self._port = port
        self.start()

    def paceline(self, *arguments: object) -> str:
        """Run a command to its end and return what it printed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        done = self._commands.run_to_end(
            "-m", "paceline.cli", *map(str, arguments),
            directory=Path.cwd(), environment={**kept, "PACELINE_HOME": str(self.home)},
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout, done.stderr)
        return str(done.stdout)

    def start(self) -> None:
        """Start the master, at the same address as before."""
        self._masters.start_master(self.home, "--port", self._port, *self._options)
        file = read_master_file(self.home)
        assert file is not None
        self.url, self._port = file.url, file.port
        self.client = Client(self.url, (self.home / "token").read_text().strip())

    def stop(self, *options: object) -> None:
        """Stop the master."""
        self.client.close()
        self.paceline("down", "--timeout", 1, *options)

    def create(self, code: Path, **changed: Any) -> Experiment:
        """Create an experiment whose script runs in the directory `code` itself."""
        config: dict[str, Any] = {
            "name": "steady",
            "entrypoint": "python3 train.py",
            "hyperparameters": {"learning_rate": 0.02},
            "searcher": {"name": "single", "metric": "test_loss"},
            "environment": {"working_dir": str(code)},
            "max_restarts": 0,
            # Pages draw what varies: what a space gives must be the same every time.
            "reproducibility": {"experiment_seed": 7},
        }
        return self.client.create_experiment(config | changed)


@pytest.fixture(scope="session")
def _built() -> None:
    if not (ASSETS_PATH / "index.html").is_file():
        pytest.skip("NOT TESTED: the web UI is not built. Hint: make ui")


@pytest.fixture(scope="session")
def master(
    master_of: Callable[..., MasterProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MasterProcess]:
    """Return a master of two slots."""
    running = master_of(tmp_path_factory.mktemp("home"), "--slots", 2)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def master_of(
    _built: None, master_server: Any, command_server: Any
) -> Callable[..., MasterProcess]:
    """Return a function that starts a master with a home and options; its caller stops it."""
    return partial(MasterProcess, (master_server, command_server))


def _start(*names: str, channel: str | None = None) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=_PATIENCE_MS)
    path = next(filter(None, map(shutil.which, names)), None)
    channel = None if path else channel
    with playwright.sync_playwright() as driver:
        try:
            chromium = driver.chromium.launch(
                executable_path=path, channel=channel, chromium_sandbox=os.geteuid() != 0
            )
        except playwright.Error as error:
            pytest.skip(f"NOT TESTED: no browser starts ({error}). Hint: make browser")
        yield chromium
        chromium.close()


# Not for the session: while it is there, the thread has an event loop, which others mind.
@pytest.fixture(scope="module")
def browser(_built: None) -> Iterator[Any]:
    """Return a Chromium for pages that are in front."""
    yield from _start(_SHELL, *_BROWSERS)


@pytest.fixture(scope="module")
def browser_with_tabs(_built: None) -> Iterator[Any]:
    """Return a Chromium in which tabs can be hidden."""
    # Playwright starts its headless shell unless it is asked for the whole browser.
    yield from _start(*_BROWSERS, channel="chromium")


def _go_whatever_the_network_does(page: Any) -> None:
    """Try once more to open an address during which an interface came or went, as other tests do.

    Chromium breaks off all requests then.
    """
    from playwright.sync_api import Error

    go = page.goto

    def go_again(url: str, **options: Any) -> Any:
        for _ in range(3):
            try:
                return go(url, **options)
            except Error as error:
                if "ERR_NETWORK_CHANGED" not in str(error):
                    raise
        return go(url, **options)

    page.goto = go_again


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page of a master; no page may have raised an error.

    Unless told otherwise a link that the master printed signs it in, or the `link` given. With
    `loads_ahead` it gets the code of all pages soon after the first.
    """
    contexts: list[Any] = []
    errors: list[str] = []

    def open_it(master: MasterProcess, path: str = "/", **options: Any) -> Any:
        is_signed_in = options.pop("is_signed_in", True)
        link = options.pop("link", None)
        loads_ahead = options.pop("loads_ahead", False)
        theme, width = _LOOK
        options = {
            "viewport": DESKTOP | {"width": int(width)},
            "color_scheme": theme,
            "base_url": master.url,
            "reduced_motion": "reduce",
        } | options
        context = browser.new_context(**options)
        context.set_default_timeout(_PATIENCE_MS)
        if not loads_ahead:
            context.add_init_script(_SAVE_DATA)
        contexts.append(context)
        if is_signed_in:
            reply = context.request.get(link or master.client.sign_in_link())
            assert reply.ok, reply.text()
        page = context.new_page()
        _go_whatever_the_network_does(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def find_problems() -> Callable[..., list[str]]:
    """Return a function that lets axe look at a page, with WCAG's rules and those asked for."""
    if not AXE.is_file():
        pytest.skip("NOT TESTED: axe-core is not installed. Hint: make ui")
    source = AXE.read_text()
    # What passes would be described too, which takes longer than to find what does not.
    script = """rules => axe.run(document, {runOnly: rules, resultTypes: ["violations"]})
        .then(found => found.violations)"""

    from playwright.sync_api import expect

    def find(page: Any, *more: str) -> list[str]:
        # While a page loads, there is little to find.
        expect(page.locator("h1")).to_have_count(1)
        expect(page.get_by_text("Loading")).to_have_count(0)
        expect(page.get_by_role("alert", name="No connection")).to_have_count(0)
        # A page that was not loaded anew has it.
        if not page.evaluate("'axe' in window"):
            page.evaluate(source)
        found = page.evaluate(script, [*WCAG, *more])
        return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]

    return find


@pytest.fixture
def unfold() -> Callable[..., None]:
    """Return a function that shows what only phones fold behind a button, `Chart options` first."""

    def press(page: Any, name: str = "Chart options") -> None:
        button = page.get_by_role("button", name=name, exact=True, include_hidden=True)
        # Wide pages have it too, but do not show it.
        button.wait_for(state="attached")
        if button.is_visible():
            button.click()

    return press


@pytest.fixture
def scroll_to() -> Callable[[Any], None]:
    """Return a function that scrolls down to a thing; what is far from sight is not drawn."""

    is_in_sight = """all => all.some((one) => {
        const { top, bottom } = one.getBoundingClientRect();
        return top < innerHeight - 100 && bottom > 50;
    })"""

    def scroll(wanted: Any) -> None:
        for _ in range(100):
            if wanted.evaluate_all(is_in_sight):
                return
            wanted.page.mouse.wheel(0, 300)
            wanted.page.wait_for_timeout(100)

    return scroll


@pytest.fixture
def go_on() -> Callable[[Any, str], None]:
    """Return a function that goes on to another address within the app.

    That is what people do, and quicker than loading the app anew. What was shown may still be
    there.
    """
    script = "path => { history.pushState(null, '', path); dispatchEvent(new Event('popstate')); }"

    def go(page: Any, path: str) -> None:
        page.evaluate(script, path)

    return go


@pytest.fixture
def write_config() -> Callable[[Any, str], None]:
    """Replace what stands in the editor, once nothing that arrives can change it in between."""

    def write(page: Any, text: str) -> None:
        page.wait_for_load_state("networkidle")
        page.get_by_role("textbox", name="Config in YAML").click()
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.insert_text(text)

    return write


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    """Return a directory with a script that trains until a file `finish` is there."""
    path = tmp_path / "code"
    path.mkdir()
    (path / "train.py").write_text(STEADY)
    yield path
    # Nothing trains on after a test that failed.
    (path / "finish").touch()
