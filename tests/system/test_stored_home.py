"""A home that a release has stored: all is still there, and a paused trial goes on."""

import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STORED = Path(__file__).parents[1] / "stored"
sys.path.insert(0, str(STORED))
try:
    from make_home import facts
finally:
    sys.path.remove(str(STORED))


@pytest.mark.parametrize("version", [13])
def test_a_master_shows_and_goes_on_with_what_a_release_has_stored(
    version: int, make_master: Callable[..., Any], tmp_path: Path
) -> None:
    with tarfile.open(STORED / f"home_{version}.tar.xz") as archive:
        archive.extractall(tmp_path / "home", filter="data")
    expected = json.loads((STORED / f"home_{version}.json").read_text())
    client = make_master(2).start().client()
    assert facts(client) == expected

    (held,) = (e for e in client.list_experiments() if e.name == "held")
    whole = next(e for e in client.list_experiments() if e.name == "grid")
    assert expected["held"]["state"] == "PAUSED"
    # The code that waits at step 4 waits only if it begins there.
    held.activate().wait()
    found = facts(client)
    assert found.pop("held") == {
        **expected.pop("held"),
        "state": "COMPLETED",
        "best": next(t.best_metric for t in whole.trials() if t.hparams == {"factor": 2}),
        "trials": [
            {
                **next(t for t in found["grid"]["trials"] if t["hparams"] == {"factor": 2}),
                "log": ["begins at step 0", "begins at step 4"],
            }
        ],
    }
    assert found == expected
    # So does a search: it makes another one of the same kind.
    again = whole.fork({"name": "again"})
    assert again.wait().value == "COMPLETED"
    assert [t["metrics"] for t in facts(client)["again"]["trials"]] == [
        t["metrics"] for t in expected["grid"]["trials"]
    ]
