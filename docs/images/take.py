"""Take the screenshots of the web UI that the documentation shows, from real runs.

Usage, in the source directory after `make ui browser`: python docs/images/take.py

Starts a master in a temporary home, runs a hyperparameter search of the example `core_api_digits`,
and photographs its pages: light, dark, and at the width of a phone.
"""

import base64
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
        search.wait()
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
    path.write_bytes(as_webp(page.context.browser, page.screenshot()))
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def as_webp(browser: Any, png: bytes) -> bytes:
    """Return a picture in the format that makes the smallest files."""
    page = browser.new_page()
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    encoded = page.evaluate(
        """async (source) => {
            const image = new Image();
            image.src = source;
            await image.decode();
            const canvas = new OffscreenCanvas(image.width, image.height);
            canvas.getContext("2d").drawImage(image, 0, 0);
            const blob = await canvas.convertToBlob({type: "image/webp", quality: 0.9});
            const bytes = new Uint8Array(await blob.arrayBuffer());
            return btoa(Array.from(bytes, (one) => String.fromCharCode(one)).join(""));
        }""",
        source,
    )
    page.close()
    return base64.b64decode(encoded)


if __name__ == "__main__":
    main()
