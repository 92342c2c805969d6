"""What follows from lines of the output, with a real master and real trials."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_lab.masters import MasterProcess

# Each rank prints what the variable says for its rank and its node, and fails if it printed.
SCRIPT = """
import json, os, sys
import paceline as det

info = det.get_cluster_info()
says = json.loads(os.environ["SAYS"])
rank = os.environ.get("RANK", "0")
if rank == "0":
    print("runs on", info.agent_id, flush=True)
line = says.get(f"{rank} {info.agent_id}") or says.get(rank)
if line:
    print(line, flush=True)
    sys.exit(3)
with det.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 1.0})
"""
LAUNCH = "python3 -m paceline.launch.torch_distributed"


@pytest.fixture
def submit(master: MasterProcess, write_context: Callable[..., Path]) -> Callable[..., Any]:
    """Return a function that submits the script with log policies."""
    code = write_context(SCRIPT)

    def create(says: str, *policies: tuple[str, str], **changed: Any) -> Any:
        config: dict[str, Any] = {
            "entrypoint": "python3 train.py", "max_restarts": 3,
            "searcher": {"name": "single", "metric": "loss"},
            "environment": {"variables": {"SAYS": says}},
            "log_policies": [{"pattern": one, "action": action} for one, action in policies],
        }  # fmt: skip
        return master.client().create_experiment(config | changed, code)

    return create


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_failure_after_such_a_line_of_any_rank_is_not_retried(
    submit: Callable[..., Any], num_ranks: int
) -> None:
    """The last rank prints it."""
    says = f'{{"{num_ranks - 1}": "CUDA error: device-side assert triggered"}}'
    changed = {"entrypoint": f"{LAUNCH} train.py", "resources": {"slots_per_trial": num_ranks}}
    policy = ("CUDA error: * assert", "no_retry")
    experiment = submit(says, policy, **(changed if num_ranks > 1 else {}))
    assert experiment.wait().value == "ERROR"
    [trial] = experiment.trials()
    data = trial.reload().data
    assert len(data.attempts) == 1, f"{data.attempts=}"
    assert "The output has 'CUDA error: device-side assert triggered', so no" in data.error
    [alert] = data.alerts
    assert alert.title.startswith("The output of attempt 1 has a text after which no restart")
    assert alert.description == "CUDA error: device-side assert triggered"


def test_another_line_is_only_told_of_and_restarts_go_on(submit: Callable[..., Any]) -> None:
    """An alert for each attempt, and no other consequence."""
    experiment = submit('{"0": "loss is 7e9"}', ("loss is", "alert"), ("ECC", "no_retry"))
    assert experiment.wait().value == "ERROR"
    data = experiment.trials()[0].reload().data
    # The same failure twice in a row ends it.
    assert len(data.attempts) == 2
    titles = [f"The output of attempt {n} has a text of a log policy" for n in (1, 2)]
    assert [one.title for one in data.alerts] == titles


@pytest.mark.long
def test_a_node_is_excluded_for_the_trial_and_another_one_takes_it(
    master: MasterProcess, submit: Callable[..., Any], make_node: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    """The trial waits, although that node is free, until another one joins."""
    client = master.client()
    policy = ("uncorrectable ECC", "exclude_node")
    experiment = submit('{"0 local": "GPU 0: uncorrectable ECC error"}', policy)
    wait_until(lambda: any(one.reason == "reserved" for one in client.queue()))
    [waiting] = client.queue()
    told = "A log policy of its config excludes local, and no other node has room for it."
    assert waiting.detail == told
    # Others still start there.
    other = submit("{}")
    assert other.wait().value == "COMPLETED"
    make_node("box", "--slots", "1").start()
    assert experiment.wait().value == "COMPLETED"
    lines = [line.text for line in experiment.trials()[0].iter_logs()]
    assert [one for one in lines if one.startswith("runs on")] == ["runs on local", "runs on box"]
