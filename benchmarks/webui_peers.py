"""The web UI beside other trackers: a chart of the same runs, address to paint.

Usage: webui_peers.py [NUM_RUNS] [NUM_POINTS] [NUM_ROUNDS]; it prints a table. Each page is loaded
by a browser that has seen it before, so that its scripts are there. Trackio is measured where
`TRACKIO_PYTHON` names a Python that has it.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from webui_cases import _browser, _master, _open

_TIMEOUT_S = 120.0


def _series(run: int, num_points: int) -> list[float]:
    noise = np.random.default_rng(run).normal(0, 0.05, num_points)
    return [float(v) for v in np.exp(-np.arange(num_points) / num_points * 3) + noise]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _served(command: list[str], url: str, **variables: str) -> Iterator[None]:
    with tempfile.TemporaryFile() as output:
        environment = {**os.environ, **variables}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            until = time.monotonic() + _TIMEOUT_S
            while True:
                try:
                    urlopen(url, timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        output.seek(0)
                        raise RuntimeError(output.read().decode()[-2000:]) from None
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait()


def _seconds(page: Any, url: str, shown: str, num_rounds: int) -> list[float]:
    """Load a page again and again; return the seconds until what is `shown` is there."""
    found = []
    for _ in range(num_rounds + 1):
        page.goto("about:blank")
        began = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.locator(shown).first.wait_for(state="attached", timeout=_TIMEOUT_S * 1000)
        found.append(time.perf_counter() - began)
    return found[1:]


def tensorboard(runs: list[list[float]], directory: Path, num_rounds: int) -> list[float]:
    """Return the seconds of the time series page, until its chart is there."""
    from tensorboardX import SummaryWriter  # type: ignore[import-untyped]

    for number, values in enumerate(runs):
        with SummaryWriter(str(directory / f"run-{number:03}")) as writer:
            for step, value in enumerate(values):
                writer.add_scalar("loss", value, step)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory)]
    with (
        _served([*command, "--port", str(port), "--host", "127.0.0.1"], url),
        _browser() as browser,
    ):
        # It reads the files first.
        time.sleep(15.0)
        return _seconds(browser.new_page(), f"{url}#timeseries", "line-chart canvas", num_rounds)


def mlflow(runs: list[list[float]], directory: Path, num_rounds: int) -> list[float]:
    """Return the seconds of the charts of an experiment, until the first line is drawn.

    It draws ten runs unless one asks for more.
    """
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{directory}/mlflow.db"
    client = MlflowClient(store)
    experiment = client.create_experiment("compared")
    for number, values in enumerate(runs):
        run = client.create_run(experiment, run_name=f"run-{number:03}").info.run_id
        metrics = [Metric("loss", value, 0, step) for step, value in enumerate(values)]
        for at in range(0, len(metrics), 1000):
            client.log_batch(run, metrics[at : at + 1000])
        client.set_terminated(run)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store]
    with _served([*command, "--port", str(port)], url), _browser() as browser:
        address = f"{url}#/experiments/{experiment}/runs?compareRunsMode=CHART"
        return _seconds(browser.new_page(), address, "path.js-line", num_rounds)


_TRACKIO_LOG_AND_SHOW = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage

runs = json.load(open(sys.argv[1]))
for number, values in enumerate(runs):
    rows = [{"loss": value} for value in values]
    SQLiteStorage.bulk_log("compared", f"run-{number:03}", rows, list(range(len(rows))))
trackio.show("compared", open_browser=False, server_port=int(sys.argv[2]))
"""


def trackio(runs: list[list[float]], directory: Path, num_rounds: int) -> list[float]:
    """Return the seconds of the metrics of a project, until its chart is there."""
    data = directory / "runs.json"
    data.write_text(json.dumps(runs))
    port = _free_port()
    url = f"http://127.0.0.1:{port}/"
    python = os.environ["TRACKIO_PYTHON"]
    command = [python, "-c", _TRACKIO_LOG_AND_SHOW, str(data), str(port)]
    with _served(command, url, TRACKIO_DIR=str(directory)), _browser() as browser:
        page = browser.new_page()
        return _seconds(page, f"{url}?project=compared", ".vega-embed canvas", num_rounds)


def paceline(runs: list[list[float]], directory: Path, num_rounds: int) -> list[float]:
    """Return the seconds of a comparison, until all lines are drawn."""
    from webui_data import store_runs

    home = directory / "home"
    experiment = store_runs(home, runs)
    with _master(home) as client, _browser() as browser:
        page = _open(browser, client, "/")
        address = f"{client.url}/compare?experiments=[{experiment}]&first={len(runs)}"
        shown = f"[role=img][aria-label^='loss: {len(runs)} lines'] canvas"
        return _seconds(page, address, shown, num_rounds)


def main() -> None:
    """Measure each, one after the other, and print a table."""
    num_runs, num_points, num_rounds = (
        int(given) for given in [*sys.argv[1:], *["100", "1000", "5"][len(sys.argv) - 1 :]]
    )
    runs = [_series(run, num_points) for run in range(num_runs)]
    print(f"{num_runs} runs of {num_points:,} points, address to paint, s")
    print("| | median | min | max |\n|---|---|---|---|")
    has_trackio = "TRACKIO_PYTHON" in os.environ
    for measure in (paceline, tensorboard, mlflow, *[trackio] * has_trackio):
        with tempfile.TemporaryDirectory() as directory:
            values = measure(runs, Path(directory), num_rounds)
        shown = [statistics.median(values), min(values), max(values)]
        print(f"| {measure.__name__} | " + " | ".join(f"{v:.2f}" for v in shown) + " |", flush=True)


if __name__ == "__main__":
    main()
