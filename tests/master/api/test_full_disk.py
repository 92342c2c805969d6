"""A full disk under a master: a request fails in a way that says to try again."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.root
def test_records_are_not_to_blame_for_a_full_disk(
    small_disk: Path, serve_master: Callable[..., Any]
) -> None:
    """Requests that come together are stored together, and fail together.

    A runner sets aside what a master fails with (500), and waits while it cannot work (503).
    """
    served = serve_master(small_disk / "home")
    try:
        served.create()
        served.schedule()

        def send(number: int) -> int:
            record = {
                "type": "metrics", "time": 0.0, "group": "training", "steps_completed": number,
                "metrics": {f"text {number}": "x" * 300_000},
            }  # fmt: skip
            batch = {"generation": number, "rank": 0, "records": [[0, record]]}
            return int(served.attempt(1, "records", batches=[batch]).status_code)

        with ThreadPoolExecutor(16) as pool:
            statuses = list(pool.map(send, range(64)))
    finally:
        served.close()
    assert set(statuses) - {200} == {503}
