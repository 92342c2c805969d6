"""A home that is backed up while a trial runs, and lost: the restored one goes on."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.restore import restore
from paceline.client import ApiError, Client

STORED = Path(__file__).parents[1] / "stored"
sys.path.insert(0, str(STORED))
try:
    from make_home import config_of, facts
finally:
    sys.path.remove(str(STORED))


@pytest.mark.slow
@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_lost_home_goes_on_from_its_backup(
    has_checkpoints: bool, make_master: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    shutil.copy(STORED / "trial.py", tmp_path / "code")
    master = make_master(1).start()
    client = master.client()
    kept, revoked = (client.create_token(name, scope="read") for name in ("kept", "revoked"))
    held = client.create_experiment(config_of("held"), tmp_path / "code")
    while not list(held.checkpoints()):
        time.sleep(0.05)
    backup = Backup(master.home, tmp_path / "backups", checkpoints=has_checkpoints)
    with backup.hold():
        made = backup.make()
    client.revoke_token(revoked.id)
    master.close()
    old = master.home.rename(tmp_path / "old")
    if not has_checkpoints:
        assert sorted(made.content.left_out) == [
            "1 checkpoint (see `--checkpoints`)",
            "attempt_key (a secret)",
            "token (a secret)",
        ]
    restored = restore(tmp_path / "backups", master.home, old_home=old)
    assert (restored.damaged, restored.num_lost_checkpoints) == ([], int(not has_checkpoints))
    client = master.start().client()
    with Client(client.url, kept.secret) as other:
        assert other.list_experiments()
    with Client(client.url, revoked.secret) as other, pytest.raises(ApiError, match="revoked"):
        other.list_experiments()
    (held,) = client.list_experiments()
    if not has_checkpoints:
        deadline = time.monotonic() + 60
        while len([line for line in held.trials()[0].iter_logs() if "step 0" in line.text]) < 2:
            assert time.monotonic() < deadline, master.log()
            time.sleep(0.05)
        held.kill()
        return
    assert held.wait().value == "COMPLETED"
    found = facts(client)["held"]["trials"][0]
    expected = json.loads((STORED / "home_5.json").read_text())["grid"]["trials"]
    whole = next(trial for trial in expected if trial["hparams"] == {"factor": 2})
    assert (found["metrics"], found["checkpoints"]) == (whole["metrics"], whole["checkpoints"])
