"""How long `paceline down` waits for a master that ends its trials."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline._cluster.messages.master_models import RUNNER_GRACE_S
from paceline.cli import _master_process


@pytest.mark.parametrize(("keep_trials", "least_s"), [(False, 100 + RUNNER_GRACE_S), (True, 0)])
def test_a_master_gets_the_time_for_its_trials_and_for_what_it_kills_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keep_trials: bool, least_s: float
) -> None:
    """The master waits for --timeout, then `RUNNER_GRACE_S` for the runners of what it kills."""
    asked: list[dict[str, Any]] = []
    waits: list[float] = []

    class Answering:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Any:
            return SimpleNamespace(shut_down=lambda **wanted: asked.append(wanted))

        def __exit__(self, *_: object) -> None:
            pass

    def wait_for_end(_: int, patience_s: float) -> bool:
        waits.append(patience_s)
        return True

    monkeypatch.setattr("paceline.client._client.Client", Answering)
    monkeypatch.setattr("paceline.client._http_session.read_token", lambda _: "token")
    monkeypatch.setattr(_master_process, "master_answers", lambda _: True)
    monkeypatch.setattr(_master_process, "wait_for_end", wait_for_end)
    file: Any = SimpleNamespace(url="http://head:1", pid=1)
    _master_process.shut_down(file, tmp_path, keep_trials=keep_trials, timeout_s=100.0)
    assert asked == [{"keep_trials": keep_trials, "timeout_s": 100.0}]
    [patience_s] = waits
    # A moment more, for its own end.
    assert least_s < patience_s < least_s + 60
