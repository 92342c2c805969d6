"""Take the screenshots of the web UI that the documentation shows, from real runs.

Usage, in the source directory after `make ui browser`: python docs/images/take.py

Starts a master in a temporary home, runs a hyperparameter search of the example `core_api_digits`,
and photographs its pages: light, dark, and at the width of a phone.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from paceline.client import Client
from paceline.client._http_session import read_master_file

IMAGES = Path(__file__).parent
EXAMPLE = IMAGES.parents[1] / "examples/core_api_digits"
DESKTOP = {"width": 1280, "height": 800}
# Pictures with many fine lines are large files.
LOW = {"width": 1280, "height": 680}
PHONE = {"width": 390, "height": 844}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_MS = 120_000
_FRAME_MS = 1000
_MOST_FRAMES = 20


def main() -> None:
    """Run the search and take all pictures."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "PACELINE_HOME": home}
        command = [sys.executable, "-m", "paceline.cli"]
        subprocess.run([*command, "up", "--detach", "--port", "0"], env=environment, check=True)
        try:
            file = read_master_file(Path(home))
            assert file is not None
            with Client(file.url, (Path(home) / "token").read_text().strip()) as client:
                take_all(client)
        finally:
            subprocess.run([*command, "down", "--timeout", "2"], env=environment, check=True)


def take_all(client: Client) -> None:
    """Take all pictures of a master."""
    search = client.create_experiment(EXAMPLE / "adaptive.yaml", EXAMPLE)
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        page = _open(browser, client, DESKTOP, "light")
        page.goto(f"/experiments/{search.id}")
        page.locator("[role=img][aria-label*='lines']").wait_for()
        client.create_experiment(EXAMPLE / "checkpoints.yaml", EXAMPLE)
        page.goto("/cluster")
        page.get_by_role("cell", name="digits-checkpoints").wait_for()
        _take(page, "cluster")
        page.goto(f"/experiments/{search.id}")
        _film(page, search)
        best = search.reload().data.best_trial_id
        shots = [
            (DESKTOP, "light", f"/experiments/{search.id}", "experiment"),
            (LOW, "dark", f"/experiments/{search.id}/hyperparameters", "hyperparameters-dark"),
            (DESKTOP, "light", f"/experiments/{search.id}/search", "rungs"),
            (DESKTOP, "light", f"/trials/{best}?x=epochs", "trial"),
            (DESKTOP, "light", f"/trials/{best}/logs", "logs"),
            (PHONE, "light", f"/experiments/{search.id}", "experiment-phone"),
            (PHONE, "dark", "/", "home-phone-dark"),
        ]
        for size, theme, address, name in shots:
            page = _open(browser, client, size, theme)
            page.goto(address)
            page.locator("h1").wait_for()
            _take(page, name)
        browser.close()


def _open(browser: Any, client: Client, size: dict[str, int], theme: str) -> Any:
    context = browser.new_context(
        base_url=client.url, viewport=size, color_scheme=theme, reduced_motion="reduce"
    )
    context.set_default_timeout(_PATIENCE_MS)
    context.request.get(client.sign_in_link())
    return context.new_page()


def _take(page: Any, name: str) -> None:
    """Take a picture once nothing is loading any more, and print its size."""
    page.get_by_text("Loading").first.wait_for(state="detached")
    page.wait_for_timeout(1000)
    path = IMAGES / f"{name}.webp"
    _save(path, [page.screenshot()])


def _film(page: Any, search: Any) -> None:
    """Take pictures of a page until the search on it has ended, as one that moves."""
    shots = [page.screenshot()]
    while not search.reload().state.is_terminal:
        page.wait_for_timeout(_FRAME_MS)
        shots.append(page.screenshot())
    page.wait_for_timeout(_FRAME_MS)
    shots.append(page.screenshot())
    # The first and the last, and so many of those between that the film is short.
    step = max(1, len(shots) // _MOST_FRAMES)
    _save(IMAGES / "search.webp", [*shots[:-1:step], shots[-1]], width=960)


def _save(path: Path, shots: list[bytes], width: int | None = None) -> None:
    """Store PNG pictures as one picture, which moves if there are several; print its size."""
    frames = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    if width is not None:
        frames = [frame.resize((width, width * frame.height // frame.width)) for frame in frames]
    times = {} if len(frames) == 1 else {"duration": [600] * (len(frames) - 1) + [4000], "loop": 0}
    frames[0].save(path, save_all=True, append_images=frames[1:], quality=80, method=6, **times)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
