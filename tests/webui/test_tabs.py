"""Many tabs and windows of one browser: those in front follow, the others hold no connection."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Client

NUM_TABS = 20
NUM_WINDOWS = 8
_PATIENCE_S = 60.0
# The page's event streams are real; this only keeps a list of them.
_WATCH = """
window.streams = [];
window.EventSource = class extends EventSource {
    constructor(url) { super(url); window.streams.push(this); }
};
"""


class Tab:
    """A tab that is hidden like a user's: Playwright lets all of its own pages seem visible."""

    def __init__(self, tabs: "Tabs", address: str, script: str, **options: Any) -> None:
        self._tabs = tabs
        options |= {"url": "about:blank", "browserContextId": tabs.profile}
        self.target: str = tabs.send("Target.createTarget", **options)["targetId"]
        attached = tabs.send("Target.attachToTarget", targetId=self.target, flatten=False)
        self.session: str = attached["sessionId"]
        self.call("Page.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH + script)
        # Animations take processor time.
        calm = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        self.call("Emulation.setEmulatedMedia", features=calm)
        self.call("Page.navigate", url=address)

    def call(self, method: str, **params: Any) -> Any:
        """Send a command to the tab and return the answer."""
        return self._tabs.send_to(self, method, params)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def bring_to_front(self) -> None:
        """Show the tab, so that the others of its window are hidden."""
        self._tabs.send("Target.activateTarget", targetId=self.target)
        self._tabs.wait_until(lambda: not self.is_hidden, "the tab is in front")

    def close(self) -> None:
        """Close the tab."""
        self._tabs.send("Target.closeTarget", targetId=self.target)

    @property
    def is_hidden(self) -> bool:
        """Whether the tab is hidden."""
        return bool(self.evaluate("document.hidden"))

    @property
    def streams(self) -> list[str]:
        """The addresses of the event streams that the tab has."""
        found: list[str] = self.evaluate(
            "streams.filter((one) => one.readyState !== 2).map((one) => one.url)"
        )
        return found

    @property
    def text(self) -> str:
        """What the page shows."""
        return str(self.evaluate("document.body?.innerText ?? ''"))

    @property
    def batches(self) -> int:
        """How far the trial is, as the page shows it; -1 before it shows it."""
        found = re.search(r"Batches\n+([\d,]+)", self.text)
        return int(found[1].replace(",", "")) if found else -1


class Tabs:
    """Tabs of one browser profile that is signed in, below Playwright: with real visibility."""

    def __init__(self, browser: Any, client: Client) -> None:
        self._devtools = browser.new_browser_cdp_session()
        self._page = browser.new_page()
        self._client = client
        self._answers: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._devtools.on("Target.receivedMessageFromTarget", self._receive)
        self.profile: str = self.send("Target.createBrowserContext")["browserContextId"]
        first = self.open(client.sign_in_link())
        self.wait_until(lambda: "Experiments" in first.text, "the browser is signed in")
        first.close()

    def open(self, path: str, script: str = "", **options: Any) -> Tab:
        """Open a page in a new tab; `background` and `newWindow` say where.

        The script runs in the page before the page's own.
        """
        address = path if path.startswith("http") else self._client.url + path
        return Tab(self, address, script, **options)

    def send(self, method: str, **params: Any) -> Any:
        """Send a command to the browser."""
        return self._devtools.send(method, params)

    def send_to(self, tab: Tab, method: str, params: dict[str, Any]) -> Any:
        """Send a command to a tab."""
        self._number += 1
        number = self._number
        message = json.dumps({"id": number, "method": method, "params": params})
        self.send("Target.sendMessageToTarget", sessionId=tab.session, message=message)
        self.wait_until(lambda: number in self._answers, f"a tab answers {method}")
        return self._answers.pop(number)["result"]

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + _PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"It takes too long until {what}."
            # Each look has the browser lay out a page.
            self.wait_ms(200)

    def wait_ms(self, milliseconds: float) -> None:
        """Let the browser work for a while."""
        self._page.wait_for_timeout(milliseconds)

    def close(self) -> None:
        """Close all tabs."""
        self.send("Target.disposeBrowserContext", browserContextId=self.profile)
        self._page.context.close()

    def _receive(self, event: dict[str, Any]) -> None:
        message = json.loads(event["message"])
        if "id" in message:
            self._answers[message["id"]] = message


@pytest.fixture
def tabs(browser_with_tabs: Any, own: Any) -> Iterator[Tabs]:
    """Return the tabs of a browser that is signed in."""
    opened = Tabs(browser_with_tabs, own.client)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def own(master_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a master of the module's own, which may be restarted."""
    started = master_of(tmp_path_factory.mktemp("own"), "--slots", 1)
    yield started
    started.stop()


@pytest.fixture
def trial(own: Any, code: Path) -> Iterator[Any]:
    """Return a trial that trains until the test is over."""
    experiment = own.create(code)
    deadline = time.monotonic() + _PATIENCE_S
    while not experiment.trials() or experiment.trials()[0].data.steps_completed == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield experiment.trials()[0]
    (code / "finish").touch()
    own.client.get_experiment(experiment.id).wait()


def follows(tabs: Tabs, *shown: Tab) -> None:
    """Check that pages load and are live: they show more and more without being touched."""
    for tab in shown:
        tabs.wait_until(lambda tab=tab: tab.batches > 0, "the page shows the trial")
    for _ in range(2):
        before = [(tab, tab.batches) for tab in shown]
        for tab, number in before:
            tabs.wait_until(lambda t=tab, n=number: t.batches > n, "the page goes on")


@pytest.mark.slow
def test_twenty_tabs_of_which_nineteen_are_hidden(tabs: Tabs, trial: Any) -> None:
    path = f"/trials/{trial.id}"
    # Half are never seen, half are in front until the next one opens.
    opened = [tabs.open(path, background=number % 2 == 0) for number in range(NUM_TABS)]
    for tab in opened[1::2]:
        tab.bring_to_front()
    front = opened[-1]
    tabs.wait_until(lambda: [tab.is_hidden for tab in opened].count(True) == 19, "19 are hidden")
    follows(tabs, front)
    # A new one loads as well.
    newest = tabs.open(path)
    follows(tabs, newest)
    assert [tab.streams for tab in opened] == [[]] * NUM_TABS
    assert len(newest.streams) == 1
    # Hidden tabs stand still; in front they are current again, also those that were never seen.
    for tab in (opened[1], opened[2]):
        before = newest.batches
        tab.bring_to_front()
        tabs.wait_until(lambda tab=tab, before=before: tab.batches >= before, "it is current")
        follows(tabs, tab)
        assert newest.is_hidden


@pytest.mark.slow
def test_more_windows_than_a_browser_has_connections(tabs: Tabs, trial: Any) -> None:
    path = f"/trials/{trial.id}"
    windows = [tabs.open(path, newWindow=True) for _ in range(NUM_WINDOWS)]
    assert not any(window.is_hidden for window in windows)
    follows(tabs, *windows)
    assert all("Live" in window.text for window in windows)
    assert sum(len(window.streams) for window in windows) == 1
    # The others go on without the one that has the stream.
    for _ in range(2):
        (leader,) = (window for window in windows if window.streams)
        windows.remove(leader)
        leader.close()
        follows(tabs, *windows)


@pytest.mark.long
def test_all_windows_say_that_the_master_is_away_and_go_on_when_it_is_back(
    tabs: Tabs, own: Any, trial: Any
) -> None:
    path = f"/trials/{trial.id}"
    windows = [tabs.open(path, newWindow=True) for _ in range(2)]
    follows(tabs, *windows)
    own.stop("--keep-trials")
    for window in windows:
        tabs.wait_until(lambda window=window: "No connection" in window.text, "it says so")
    before = max(window.batches for window in windows)
    own.start()
    for window in windows:
        tabs.wait_until(lambda window=window: window.batches > before, "it goes on")
    follows(tabs, *windows)
    tabs.wait_until(lambda: all("Live" in window.text for window in windows), "all say so")


@pytest.mark.long
def test_a_hidden_tab_is_current_in_front_whatever_happened_meanwhile(
    tabs: Tabs, own: Any, trial: Any
) -> None:
    """Events that came while no tab was in front, and those that another tab has seen."""
    for is_followed in (False, True):
        tab = tabs.open(f"/trials/{trial.id}")
        follows(tabs, tab)
        other = tabs.open(f"/trials/{trial.id}" if is_followed else "/icon.svg")
        tabs.wait_until(lambda tab=tab: tab.is_hidden, "the tab is hidden")
        shown = tab.batches
        tabs.wait_until(
            lambda shown=shown: own.client.get_trial(trial.id).data.steps_completed > shown + 6,
            "the trial goes on",
        )
        assert tab.batches < shown + 6
        now = own.client.get_trial(trial.id).data.steps_completed
        tab.bring_to_front()
        tabs.wait_until(lambda tab=tab, now=now: tab.batches >= now, "the tab is current")
        follows(tabs, tab)
        # It goes on where it stood.
        tabs.wait_until(lambda tab=tab: len(tab.streams) == 1, "it has the stream")
        assert "/events?after=" in tab.streams[0]
        other.close()
