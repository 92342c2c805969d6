"""Names, descriptions and output that would change the terminal of whoever looks at them."""

import json
from pathlib import Path
from typing import Any

import pytest

EVIL = "evil\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe\x85"
UNSAFE = set("\x07\x1b\x9b\x85\u202e")
# The runner takes sequences that begin with an escape out of what is printed.
TRAIN = f"""
import paceline
with paceline.core.init() as context:
    context.train.report_validation_metrics(1, {{"loss": 1.0, {EVIL!r}: 2.0}})
print({EVIL!r}, flush=True)
raise RuntimeError({EVIL!r})
"""


@pytest.mark.long
def test_no_command_passes_on_what_would_change_the_terminal(mastered: Any, code: Path) -> None:
    (code / "train.py").write_text(TRAIN)
    config = json.loads((code / "config.yaml").read_text())
    config |= {"name": EVIL, "description": EVIL, "labels": [EVIL], "data": {EVIL: EVIL}}
    config["hyperparameters"] = {EVIL: EVIL}
    (code / "config.yaml").write_text(json.dumps(config))
    created = mastered("e", "create", code / "config.yaml", code, "-f", "--logs", code=None)
    assert "evil" in created.stdout
    seen = [created]
    for arguments in (
        ["e", "list"], ["e", "describe", 1], ["e", "list", "--json"],
        ["e", "describe", 1, "--json"],
        ["e", "lt", 1], ["t", "describe", 1], ["t", "describe", 1, "--json"], ["t", "logs", 1],
        ["t", "logs", 1, "--json"], ["e", "config", 1], ["job", "list"], ["status"],
        ["t", "metrics", 1], ["e", "describe", EVIL], ["e", "create", EVIL], [EVIL],
    ):  # fmt: skip
        seen.append(mastered(*arguments, code=None))
        if "--json" in arguments:
            json.loads(seen[-1].stdout.splitlines()[0] if "logs" in arguments else seen[-1].stdout)
    assert json.loads(mastered("e", "list", "--json").stdout)[0]["name"] == EVIL
    told = {str(result.args): UNSAFE.intersection(result.stdout + result.stderr) for result in seen}
    assert {args: found for args, found in told.items() if found} == {}
