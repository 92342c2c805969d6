"""A master under attack by strangers: who is known goes on."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

ATTACK_S = 30.0
MIB = 1024 * 1024
REPORTING = """
import time
from paceline import core

with core.init() as context:
    step = 0
    while not context.preempt.should_preempt():
        step += 1
        context.train.report_training_metrics(step, {"loss": 1.0 / step})
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_training_reports_and_health_answers_under_attack(
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    """Half-open connections, bodies of 400 MB, bombs of YAML and tar, at once, without a token."""
    master = make_master(1).start()
    client = master.client()
    config = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
    [trial] = client.create_experiment(config, write_context(REPORTING)).trials()
    wait_until(lambda: trial.reload().steps_completed > 20)
    address = json.loads((master.home / "master.json").read_text())
    process = psutil.Process(address["pid"])
    attackers = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("attackers.py")),
                str(address["port"]),
                str(ATTACK_S),
                kind,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in ("half", "bodies", "bombs")
    ]
    latencies, memory, steps = [], [process.memory_info().rss], [trial.reload().steps_completed]
    while any(attacker.poll() is None for attacker in attackers):
        began = time.monotonic()
        # A connection of its own each time, as of somebody who comes new.
        reply = httpx2.get(f"{address['url']}/api/v1/health", timeout=60, verify=False)
        latencies.append(time.monotonic() - began)
        assert reply.status_code == 200
        memory.append(process.memory_info().rss)
        steps.append(trial.reload().steps_completed)
        time.sleep(0.2)
    counts = [int(attacker.communicate()[0]) for attacker in attackers]
    wait_until(lambda: trial.reload().steps_completed > steps[-1])
    log = sum(path.stat().st_size for path in master.home.glob("master.log*"))
    print(
        f"\nhalf-open connections {counts[0]}, bodies of 400 MB {counts[1]}, bombs {counts[2]};"
        f" /health median {statistics.median(latencies) * 1000:.0f} ms, max"
        f" {max(latencies) * 1000:.0f} ms of {len(latencies)}; reported steps"
        f" {steps[-1] - steps[0]}; memory {memory[0] / MIB:.0f} -> max {max(memory) / MIB:.0f} MiB;"
        f" log {log} bytes; {os.cpu_count()} cores"
    )
    assert min(counts) > 0
    assert steps[-1] > steps[0]
    assert max(memory) < 400 * MIB
    assert log < 50 * MIB
    assert "Traceback" not in master.log(), master.log()[-5000:]
