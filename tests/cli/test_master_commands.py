"""The commands against a real master."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml

import paceline
from paceline._cluster.master.api.web_ui_files import has_web_ui


def create(run: Any, code: Path, *options: object) -> dict[str, Any]:
    """Create an experiment and return it."""
    result = run("e", "create", code / "config.yaml", code, "--json", *options)
    created: dict[str, Any] = json.loads(result.stdout)
    return created


def first_trial(run: Any, experiment: int) -> dict[str, Any]:
    """Wait for the experiment's first trial and return it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        trials = json.loads(run("e", "lt", experiment, "--json").stdout)
        if trials and trials[0]["steps_completed"] > 0:
            trial: dict[str, Any] = trials[0]
            return trial
        time.sleep(0.2)
    raise AssertionError("no trial has reported")


def wait_for_output(run: Any, *arguments: object, has: Callable[[str], bool]) -> str:
    """Run a command again until its output has something; the master may do that a moment later."""
    deadline = time.monotonic() + 60
    while not has(output := run(*arguments).stdout):
        assert time.monotonic() < deadline, output
        time.sleep(0.2)
    return output


@pytest.mark.long
def test_status_and_slots_of_a_running_master(mastered: Any) -> None:
    status = json.loads(mastered("status", "--json").stdout)
    assert status["num_slots"] == 2
    shown = mastered("status").stdout.splitlines()
    assert shown[0].split() == ["Master", status["url"]]
    assert {"Waiting trials", "Problems"} <= {line[:16].strip() for line in shown}
    # On a busy machine, a request may be slow.
    assert [one for one in status["problems"] if "took longer than" not in one] == []
    slots = json.loads(mastered("slot", "list", "--json").stdout)
    assert [slot["id"] for slot in slots] == [0, 1]


def test_up_again_says_that_a_master_runs(mastered: Any) -> None:
    for options in ((), ("--host", "127.0.0.1"), ("--host", "localhost")):
        assert "A master runs already at http://" in mastered("up", "--detach", *options).stdout
    assert "`--port 0` has no effect" in mastered("up", "--detach", "--port", 0).stdout
    refused = mastered("up", "--detach", "--port", 1, code=1)
    assert "to start one on port 1, but one runs at http://" in refused.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.2"])
def test_a_master_that_others_reach_starts_in_the_background(
    paceline: Any, tmp_path: Path, host: str
) -> None:
    """Its own machine reaches it, by a name that it takes from browsers if there is one."""
    up = ("up", "--detach", "--slots", 1, "--host", host, "--unencrypted")
    told = paceline(*up, "--port", 0).stdout
    try:
        file = json.loads((tmp_path / "home" / "master.json").read_text())
        name = "127.0.0.1" if host == "0.0.0.0" else host
        assert file["url"] == f"http://{name}:{file['port']}"
        shown = file["public_url"]
        assert "0.0.0.0" not in shown
        assert f"The master runs at {shown} (" in told
        assert f"runs already at {shown} (" in paceline(*up).stdout
        if host == "0.0.0.0":
            with httpx2.Client(timeout=60) as browser:
                assert browser.get(paceline("login").stdout.strip()).status_code == 303
        for options, what in (
            (("--host", "127.0.0.3", "--unencrypted"), "on 127.0.0.3"),
            (("--tls-cert", "c.pem", "--tls-key", "k.pem"), "with a certificate"),
        ):
            refused = paceline("up", "--detach", *options, code=1)
            assert f"to start one {what}, but one runs at {shown}" in refused.stderr
    finally:
        paceline("down", "--timeout", 1)


def test_a_runner_takes_an_address_without_a_scheme(mastered: Any, tmp_path: Path) -> None:
    address = json.loads(mastered("status", "--json").stdout)["url"].removeprefix("http://")
    token = tmp_path / "token"
    token.touch(mode=0o600)
    made = mastered("token", "create", "reader", "--scope", "read")
    token.write_text(made.stdout)
    assert "Programs take it from $PACELINE_TOKEN." in made.stderr
    options = ("--token-file", token, "--dir", tmp_path / "runner", "--slots", 1)
    refused = mastered("runner", "--master", address, *options, code=1)
    assert "The token must have the scope 'runner' for that" in refused.stderr
    made = mastered("token", "create", "box", "--scope", "runner")
    assert "for `paceline runner --token-file`." in made.stderr
    token.write_text("")
    assert "is empty" in mastered("runner", "--master", address, *options, code=1).stderr
    token.write_text("of-another-master")
    words = ["runner", "--master", address, *map(str, options)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    # It goes on asking, and says what is wrong.
    line = next(line for line in process.stderr if "WARNING" in line)
    process.terminate()
    process.communicate(timeout=60)
    assert f"does not take the token in {token}: HTTP 401: " in line


def test_a_runner_with_a_token_for_another_node_or_pool_ends_with_what_to_do(
    mastered: Any, tmp_path: Path
) -> None:
    url = json.loads(mastered("status", "--json").stdout)["url"]
    made = mastered("token", "create", "b", "--scope", "runner", "--node", "box", "--pool", "gpu")
    assert "has the scope runner, is for node box, pool gpu and expires at" in made.stderr
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(made.stdout)
    options = ("--token-file", token, "--dir", tmp_path / "runner", "--slots", 1)
    # The directory of the same runner, which is started again.
    for words, what in (
        (("--name", "barn", "--pool", "gpu"), "register as 'box', the only node"),
        (("--name", "box", "--pool", "cpu"), "be in 'gpu', the only pool"),
        (("--name", "box"), "be in 'gpu', the only pool"),
    ):
        ended = mastered("runner", "--master", url, *options, *words, code=1)
        error, hint = ended.stderr.strip().splitlines()
        assert error.startswith("Error: The master refuses this node. HTTP 403: ")
        assert what in error
        assert hint.startswith("Hint: start it with `--")
    for words, what in (
        (("--scope", "read", "--node", "box"), "a token of the scope `runner`, but `scope` is"),
        (("--scope", "runner", "--pool", "a b"), "`pool` must be up to 63 letters"),
        (("--scope", "runner", "--node", "local"), "another machine than the master's own"),
    ):
        refused = mastered("token", "create", "wrong", *words, code=1)
        assert what in refused.stderr
        assert "Traceback" not in refused.stderr
    mastered("token", "create", "any-node", "--scope", "runner")
    head, *listed = mastered("token", "list").stdout.splitlines()
    assert "For" in head
    [bound] = [line for line in listed if "node box, pool gpu" in line]
    assert re.search(r"\bb +admin +runner +node box, pool gpu +valid", bound)
    rows = json.loads(mastered("token", "list", "--json").stdout)
    found = {one["name"]: (one["node"], one["pool"]) for one in rows}
    assert (found["any-node"], found["b"]) == ((None, None), ("box", "gpu"))


def test_a_runner_that_labels_put_into_another_pool_than_its_tokens_ends_and_says_so(
    mastered: Any, tmp_path: Path
) -> None:
    url = json.loads(mastered("status", "--json").stdout)["url"]
    made = mastered("token", "create", "default-only", "--scope", "runner", "--pool", "default")
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(made.stdout)
    words = [
        "runner", "--master", url, "--token-file", token, "--dir", tmp_path / "runner", "--slots",
        "1", "--name", "labeled", "--labels", "gpu=a100",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "Node labeled is registered" in next(process.stderr)
    mastered("pool", "set", "big", "--labels", "gpu=a100")
    try:
        error, hint = process.communicate(timeout=60)[1].splitlines()
    finally:
        process.kill()
        # The node counts as present for a while: later tests see no free slot of it.
        mastered("slot", "drain", "labeled", 0)
        mastered("pool", "reset", "big")
    assert error.startswith("Error: The master wants no more polls of this runner. HTTP 403: ")
    assert "must be in 'default', the only pool of its token" in error
    assert "but is in 'big' by its labels." in error
    assert hint.startswith("Hint: start it without the labels of that pool")
    assert process.returncode == 1


def test_a_runner_ends_in_a_sentence_when_its_directory_is_taken_away(
    mastered: Any, tmp_path: Path
) -> None:
    url = json.loads(mastered("status", "--json").stdout)["url"]
    token = tmp_path / "token"
    token.touch(mode=0o600)
    made = mastered("token", "create", "taken-away", "--scope", "runner", "--json")
    token.write_text(json.loads(made.stdout)["secret"])
    directory = tmp_path / "runner"
    words = [
        "runner", "--master", url, "--token-file", token, "--dir", directory, "--slots",
        "1", "--name", "taken", "--check-every", 0,
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "Node taken is registered" in next(process.stderr)
    try:
        deadline = time.monotonic() + 60
        while not (directory / "cluster_id").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        directory.rename(tmp_path / "elsewhere")
        told = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        mastered("slot", "drain", "taken", 0)
    assert "Traceback" not in told, told
    assert told.count("\n") == 2, told
    error, hint = told.splitlines()
    place = f"The directory {str(directory)!r} must stay while the runner runs"
    assert error == f"Error: {place}, but it is gone."
    assert hint.startswith("Hint: start the runner again")
    assert process.returncode == 1


@pytest.mark.root
@pytest.mark.parametrize("room", [0, 4096])
def test_a_runner_that_begins_on_a_full_disk_says_so(
    paceline: Any, tmp_path: Path, small_disk: Path, fill_disk: Callable[..., None], room: int
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("any")
    directory = small_disk / "runner"
    for path in (directory, directory / "attempts"):
        path.mkdir()
    fill_disk(small_disk, leave_bytes=room)
    options = ("--token-file", token, "--dir", directory, "--slots", 1)
    ended = paceline("runner", "--master", "127.0.0.1:1", *options, code=1)
    assert f"must be able to write to '{directory}', but: [Errno 28]" in ended.stderr
    assert "Traceback" not in ended.stderr
    (small_disk / "filler").unlink()
    (directory / "runner.lock").unlink(missing_ok=True)
    (directory / "runner.lock").mkdir()
    ended = paceline("runner", "--master", "127.0.0.1:1", *options, code=1)
    assert f"must be able to write to '{directory}', but: [Errno 21]" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_printed_link_signs_a_browser_in(mastered: Any) -> None:
    told = mastered("up", "--detach").stdout
    links = [mastered("login").stdout.strip()]
    if has_web_ui():
        assert "\nSign in: http://" in told
        links.append(told.rpartition("Sign in: ")[2].strip())
    for url in links:
        page = {"accept": "text/html"}
        with httpx2.Client(follow_redirects=True, timeout=60, verify=False) as browser:
            landed = browser.get(url, headers=page)
            assert landed.url.path == "/"
            assert landed.status_code in (200, 503)
            base = f"http://127.0.0.1:{landed.url.port}"
            assert browser.get(f"{base}/api/v1/session").json()["user"] == "admin"
            assert browser.get(f"{base}/api/v1/slots").status_code == 200
            for script in re.findall(r'src="(/assets/[^"]+\.js)"', landed.text):
                assert "javascript" in browser.get(base + script).headers["content-type"]
            assert browser.get(url, headers=page).url.query == b"problem=link"
    told = mastered("user", "set-password", "--password", "correct horse").stdout
    assert told == "The password of admin is set.\n"
    refused = mastered("user", "set-password", "--password", "short", code=1)
    assert refused.stderr == "Error: `password` must have at least 8 characters.\n"
    other = ("user", "set-password", "--user", "bob", "--password", "correct horse")
    told = mastered(*other, code=1).stderr
    assert told.startswith("Error: There is no user 'bob'.\nHint: `paceline user add bob`")
    login = {"user": "admin", "password": "correct horse"}
    with httpx2.Client(base_url=base, timeout=60, verify=False) as browser:
        assert browser.post("/api/v1/login", json=login).status_code == 200
        assert browser.get("/api/v1/slots").status_code == 200


def test_the_link_for_a_new_user_signs_in_that_user(mastered: Any) -> None:
    """And not whoever made it."""
    url = json.loads(mastered("user", "add", "carol", "--json").stdout)["sign_in_url"]
    with httpx2.Client(follow_redirects=False) as browser:
        assert browser.get(url).status_code == 303
        session = browser.get(f"{url.partition('/api')[0]}/api/v1/session").json()
    assert (session["owner"], session["scope"]) == ("carol", "user")
    mastered("user", "remove", "carol")


@pytest.mark.long
def test_experiments_of_others_are_listed_when_asked_for(mastered: Any, code: Path) -> None:
    """By each option that asks for them; a lone user gets no hint."""
    mastered("e", "create", code / "config.yaml", code, "--paused")
    alone = mastered("e", "list")
    assert alone.stderr == ""
    url = json.loads(mastered("user", "add", "dave", "--json").stdout)["sign_in_url"]
    made = mastered("token", "create", "of-dave", "--scope", "submit", "--user", "dave", "--json")
    headers = {"Authorization": f"Bearer {json.loads(made.stdout)['secret']}"}
    body = {"config": {**json.loads((code / "config.yaml").read_text()), "name": "davids"}}
    with httpx2.Client(headers=headers) as client:
        answer = client.post(f"{url.partition('/api')[0]}/api/v1/experiments", json=body)
    assert answer.status_code == 201, answer.text

    def listed(*options: str) -> tuple[set[tuple[str, str]], str]:
        result = mastered("e", "list", *options, "--format", "tsv")
        titles, *rows = (line.split("\t") for line in result.stdout.splitlines())
        name, owner = titles.index("Name"), titles.index("Owner")
        return {(row[name] == "davids", row[owner]) for row in rows}, result.stderr

    own, other = (False, "admin"), (True, "dave")
    hint = "Hint: only yours are listed; --everyone lists those of all users.\n"
    assert listed() == ({own}, hint)
    assert listed("--everyone") == ({own, other}, "")
    assert listed("--owner", "dave") == ({other}, "")
    assert listed("--project", "Default") == ({own, other}, "")
    assert listed("--query", 'owner = "dave"') == ({other}, "")
    mastered("e", "kill", "--query", "owner = dave", "--yes")
    mastered("user", "remove", "dave")


def test_a_single_experiment_is_followed_to_its_end(mastered: Any, code: Path) -> None:
    result = mastered("e", "create", code / "config.yaml", code, "-f")
    assert "Created experiment" in result.stdout
    assert "\nstep 3\n" in result.stdout
    assert "validation after batch 3: loss=0.3333 epochs=3" in result.stdout
    assert "Best loss: 0.3333 after 3 batches" in result.stdout
    assert "is COMPLETED after" in result.stdout.splitlines()[-1]
    look, go_on = result.stderr.splitlines()[-2:]
    assert re.fullmatch(r"look: paceline e describe \d+, or http://\S+/experiments/\d+", look)
    assert re.fullmatch(r"continue: paceline e fork \d+ --config FIELD=VALUE", go_on)
    assert "\x1b" not in result.stdout


# A journal in which the line of one of two ranks is damaged.
LOSE = """
import os
from pathlib import Path
from paceline._base.journal_reading_and_writing import frame_line, segment_name
from paceline._base.journal_records import encode_record
from paceline.journal import MetricsReported

for rank in (0, 2):
    lines = [frame_line(-1, b'{"journal_version":1,"time":0.0}')]
    for step in (1, 2, 3):
        report = MetricsReported(
            time=0.0, group="training", steps_completed=step, metrics={f"x{rank}": step}
        )
        lines.append(frame_line(step - 1, encode_record(report)))
    if rank == 2:
        lines[2] = lines[2].replace(b"metrics", b"metrix?", 1)
    directory = Path(os.environ["PACELINE_RUN_DIR"]) / "journal" / f"a1.g0.r{rank}"
    directory.mkdir(parents=True)
    (directory / segment_name(0)).write_bytes(b"".join(lines))
"""


# Of the third start of the workers.
RESTARTED = """
import os
from pathlib import Path
from paceline._base.journal_reading_and_writing import frame_line, segment_name
from paceline._base.journal_records import encode_record
from paceline.journal import AttemptStarted

directory = Path(os.environ["PACELINE_RUN_DIR"]) / "journal" / "a1.g1.r0"
directory.mkdir(parents=True)
causes = ("Rank 0 exited with code 7.", "Rank 2 was ended by SIGKILL.")
started = AttemptStarted(
    time=0.0, attempt=1, generation=1, rank=0, world_size=3, pid=1, host="h", resumed_from=None,
    steps_completed=0, restart_causes=causes,
)
(directory / segment_name(0)).write_bytes(frame_line(0, encode_record(started)))
"""


def test_restarts_of_workers_are_told_with_the_last_cause(mastered: Any, code: Path) -> None:
    (code / "train.py").write_text(RESTARTED)
    told = mastered("e", "create", code / "config.yaml", code, "-f").stdout
    assert "workers started again: Rank 2 was ended by SIGKILL." in told
    found = re.search(r"Created experiment (\d+)", told)
    assert found is not None
    [trial] = json.loads(mastered("e", "lt", found[1], "--json").stdout)
    described = mastered("t", "describe", trial["id"]).stdout
    assert re.search(
        r"Worker restarts +2, the last one: Rank 2 was ended by SIGKILL\.\n", described
    )


# Killed at its ninth batch, without a checkpoint; then it ends after its fifth.
BEGINS_ANEW = """
import os, signal
from paceline import core

with core.init() as context:
    first = not os.path.exists(os.environ["MARK"])
    for step in range(1, 10 if first else 6):
        context.train.report_validation_metrics(step, {"loss": 1 / step})
    if first:
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trial_that_began_again_tells_what_it_lost(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    (code / "train.py").write_text(BEGINS_ANEW)
    more = {
        "max_restarts": 1,
        "environment": {"environment_variables": {"MARK": str(tmp_path / "mark")}},
    }
    config = code / "config.yaml"
    config.write_text(json.dumps({**json.loads(config.read_text()), **more}))
    told = mastered("e", "create", config, code, "-f").stdout
    found = re.search(r"Created experiment (\d+)", told)
    assert found is not None
    [trial] = json.loads(mastered("e", "lt", found[1], "--json").stdout)
    described = mastered("t", "describe", trial["id"]).stdout
    assert re.search(r"Batches +5 in attempt 2; 9 before it were lost\n", described)


def test_lost_records_are_told_and_end_with_3(mastered: Any, code: Path) -> None:
    (code / "train.py").write_text(LOSE)
    result = mastered("e", "create", code / "config.yaml", code, "-f", code=3)
    assert "Record 1 of rank 2 (generation 0) is lost" in result.stdout
    last, told = result.stdout.splitlines()[-2:]
    assert "is COMPLETED after" in last
    experiment = int(last.split()[1])
    assert told == f"1 record is lost; `paceline e logs {experiment}` says which."
    waited = mastered("e", "wait", experiment, code=3)
    assert waited.stdout == f"Experiment {experiment} is COMPLETED; 1 record is lost.\n"
    mastered("e", "logs", experiment, "-f", code=3)
    described = mastered("e", "describe", experiment).stdout
    assert "1 record is lost; the trials' logs say which" in described
    [trial] = json.loads(mastered("e", "lt", experiment, "--json").stdout)
    assert trial["num_records_lost"] == 1
    assert "1 record is lost; its log says which" in mastered("t", "describe", trial["id"]).stdout


def test_an_ended_experiment_is_archived_and_deleted(mastered: Any, code: Path) -> None:
    experiment = create(mastered, code, "--paused", "--config", "data={steps: 1}")["id"]
    refused = mastered("e", "delete", experiment, code=1)
    assert f"Experiment {experiment} must have ended" in refused.stderr
    mastered("e", "activate", experiment)
    mastered("e", "wait", experiment)
    mastered("e", "archive", experiment)

    def listed(*options: str) -> list[int]:
        return [one["id"] for one in json.loads(mastered("e", "list", "--json", *options).stdout)]

    assert experiment not in listed()
    assert listed("--archived") == [experiment]
    told = mastered("e", "delete", experiment, "--yes").stdout
    assert "takes away 1 trial, 3 metric values and 1 checkpoint (5 B)." in told
    assert mastered("e", "describe", experiment, code=1).stderr.startswith("Error: There is no")


def test_an_experiment_is_forked_and_its_code_downloaded(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    experiment = create(mastered, code, "--paused")["id"]
    told = mastered("e", "fork", experiment, "--config", "name=again", "--paused").stdout
    assert told.endswith(f"(again) from experiment {experiment}.\n")
    forked = int(told.split()[2])
    assert json.loads(mastered("e", "describe", forked, "--json").stdout)["state"] == "PAUSED"
    target = tmp_path / "copy"
    told = mastered("e", "download", forked, target).stdout
    assert told.startswith("Wrote config.yaml and 2 files into ")
    assert (target / "train.py").read_text() == (code / "train.py").read_text()
    assert (
        "must be a new or empty directory"
        in mastered("e", "download", forked, target, code=1).stderr
    )
    for one in (experiment, forked):
        mastered("e", "kill", one)


def test_a_search_is_followed_and_ends_with_a_leaderboard(mastered: Any, code: Path) -> None:
    result = mastered(
        *("e", "create", code / "config.yaml", code, "-f"),
        *("--config", "searcher={name: random, metric: loss, max_trials: 4}"),
        *("--config", "hyperparameters.lr={type: double, minval: 1, maxval: 2}"),
        *("--config", "reproducibility.experiment_seed=5"),
    )
    lines = result.stdout.splitlines()
    created = [line for line in lines if " created   lr=" in line]
    assert len(created) == 4
    assert "step 1" not in lines
    board = lines.index("Best 4 of 4 trials by loss (smaller is better)")
    metrics = [float(line.split()[2]) for line in lines[board + 3 : board + 7]]
    assert metrics == sorted(metrics)
    rates = [float(line.split("lr=")[1]) for line in created]
    assert metrics[0] == pytest.approx(min(rates) / 3, abs=1e-3)
    # Its end was planned.
    assert "It ended as" not in result.stdout


def test_a_search_that_its_limit_ends_says_so(mastered: Any, code: Path) -> None:
    result = mastered(
        *("e", "create", code / "config.yaml", code, "-f"),
        *("--config", "searcher={name: random, metric: loss, max_trials: 4}"),
        *("--config", "searcher.limits.max_trials=2"),
        *("--config", "hyperparameters.lr={type: double, minval: 1, maxval: 2}"),
    )
    told = "the search has reached its limit `max_trials` of 2, with 2 of 2 trials"
    assert told in result.stdout
    experiment = re.search(r"Experiment (\d+)", result.stdout)
    assert experiment is not None
    assert told in " ".join(mastered("e", "describe", experiment[1]).stdout.split())
    assert told in mastered("e", "wait", experiment[1]).stdout


def test_a_failing_script_shows_its_traceback_and_ends_with_1(mastered: Any, code: Path) -> None:
    (code / "train.py").write_text("raise ValueError('no such data')\n")
    result = mastered("e", "create", code / "config.yaml", code, "-f", code=1)
    assert "ValueError: no such data" in result.stdout
    assert "attempt 1 ended with exit code 1" in result.stdout
    assert " is ERROR after " in result.stdout
    assert "Traceback" not in result.stderr


SPACE = "hyperparameters={lr: {type: double, minval: 0.1, maxval: 1, count: 2}}"
REFUSING = """
import paceline

with paceline.core.init() as context:
    raise paceline.InvalidHP("the width must be even")
"""
DIVERGING = """
import paceline

with paceline.core.init() as context:
    for step in (1, 2, 3):
        context.train.report_validation_metrics(step, {"loss": float("nan")})
"""


@pytest.mark.parametrize("search", ["single", "grid"])
def test_a_search_whose_trials_all_refuse_their_hyperparameters_fails(
    mastered: Any, code: Path, search: str
) -> None:
    (code / "train.py").write_text(REFUSING)
    options = ["--config", f"searcher.name={search}", "--config", SPACE, "-f"]
    result = mastered("e", "create", code / "config.yaml", code, *options, code=1)
    assert "is ERROR after" in result.stdout
    assert "All trials refused their hyperparameters." in result.stdout
    assert "InvalidHP: the width must be even" in result.stdout
    experiment = re.search(r"Created experiment (\d+)", result.stdout)
    assert experiment is not None
    mastered("e", "wait", experiment[1], code=1)
    assert "ERROR" in mastered("e", "describe", experiment[1]).stdout


@pytest.mark.parametrize(
    ("search", "reports"), [("single", "all 3 reports."), ("grid", "all 6 reports of 2 trials.")]
)
def test_a_metric_that_is_always_nan_is_told_with_the_number_of_its_reports(
    mastered: Any, code: Path, search: str, reports: str
) -> None:
    (code / "train.py").write_text(DIVERGING)
    options = ["--config", f"searcher.name={search}", "--config", SPACE, "-f"]
    # A search without a result has an exit code of its own.
    exit_code = 0 if search == "single" else 4
    result = mastered("e", "create", code / "config.yaml", code, *options, code=exit_code)
    assert f"The metric `loss` was NaN or infinite in {reports}" in result.stdout
    assert "No trial reported" not in result.stdout
    found = re.search(r"Created experiment (\d+)", result.stdout)
    assert found is not None
    for command in ("wait", "describe"):
        told = mastered("e", command, found[1], code=exit_code if command == "wait" else 0).stdout
        assert f"The metric `loss` was NaN or infinite in {reports}" in told


def test_pause_activate_and_wait(mastered: Any, code: Path) -> None:
    experiment = create(mastered, code, "--config", "data={steps: 5, held_at: 2}")["id"]
    trial = first_trial(mastered, experiment)
    assert mastered("e", "pause", experiment).stdout == (
        f"Experiment {experiment} is PAUSED; 1 trial is still running and gets up to 600 s to store"
        " a checkpoint.\n"
    )
    refused = mastered("e", "wait", experiment, code=1)
    assert f"Hint: `paceline e activate {experiment}` first." in refused.stderr
    mastered("e", "activate", experiment)
    done = mastered("e", "wait", experiment)
    assert done.stdout == f"Experiment {experiment} is COMPLETED.\n"
    described = json.loads(mastered("t", "describe", trial["id"], "--json").stdout)
    assert described["steps_completed"] == 5
    assert len(described["attempts"]) == 2
    text = mastered("t", "describe", trial["id"]).stdout
    assert "packages (" in text
    whole = mastered("t", "describe", trial["id"], "--environment").stdout
    told = yaml.safe_load(whole[whole.index("- attempt: 1") :])
    assert told[0]["environment"]["paceline"] == paceline.__version__
    assert told[1] == {"attempt": 2, "environment": "that of attempt 1"}
    assert "preempted" in text


@pytest.mark.long
def test_a_reopened_experiment_is_followed_from_its_reopening(mastered: Any, code: Path) -> None:
    experiment = create(mastered, code)["id"]
    mastered("e", "wait", experiment)
    result = mastered("e", "continue", experiment, "-f", "--config", "data.steps=5")
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("step ")] == ["step 4", "step 5"]
    assert "attempt 2 started" in result.stdout
    assert "attempt 1" not in result.stdout
    assert "batch 3" not in result.stdout
    assert " is COMPLETED after " in lines[-1]


def test_the_logs_of_an_ended_experiment_are_followed_to_their_end(
    mastered: Any, code: Path
) -> None:
    experiment = create(mastered, code)["id"]
    mastered("e", "wait", experiment)
    assert mastered("e", "logs", experiment, "-f").stdout == "step 1\nstep 2\nstep 3\n"
    [line] = mastered("e", "logs", experiment, "-f", "--tail", 1, "-t").stdout.splitlines()
    moment, _, text = line.partition(" step ")
    assert time.strptime(moment, "%Y-%m-%d %H:%M:%S").tm_year > 2000
    assert text == "3"


def test_damaged_lines_of_logs_are_counted_on_the_error_stream(mastered: Any, code: Path) -> None:
    experiment = create(mastered, code)["id"]
    mastered("e", "wait", experiment)
    trial = first_trial(mastered, experiment)["id"]
    home = Path(json.loads(mastered("status", "--json").stdout)["home"])
    path = home / "logs" / f"trial-{trial}" / "attempt-1.jsonl"
    path.write_bytes(path.read_bytes().replace(b"step 2", b"step 6", 1))
    for command in (("e", "logs", experiment), ("t", "logs", trial)):
        result = mastered(*command)
        assert "1 damaged line is left out." in result.stderr
        assert "step 6" not in result.stdout
        assert "step 3" in result.stdout


@pytest.mark.long
def test_the_logs_of_a_running_experiment_are_followed_from_the_tail_on(
    mastered: Any, code: Path
) -> None:
    experiment = create(mastered, code, "--config", "data={steps: 25, pause_s: 0.2}")["id"]
    wait_for_output(mastered, "e", "logs", experiment, has=lambda output: "step 2\n" in output)
    shown = mastered("e", "logs", experiment, "-f", "--tail", 1).stdout.splitlines()
    steps = [int(line.split()[1]) for line in shown if line.startswith("step ")]
    assert steps[0] > 1
    assert steps == list(range(steps[0], 26))
    assert "trial_created" not in shown


def test_a_script_that_only_writes_to_stderr_is_quoted_once_in_a_search(
    mastered: Any, code: Path
) -> None:
    (code / "train.py").write_text("import sys\nsys.exit('no such data')\n")
    result = mastered(
        *("e", "create", code / "config.yaml", "-f"),
        *("--config", "searcher={name: random, metric: loss, max_trials: 1}"),
        code=1,
    )
    assert result.stdout.count("no such data") == 1
    assert result.stdout.count("exit code 1") == 1
    trial = next(x for x in result.stdout.splitlines() if " created" in x).split()[2]
    assert f"`paceline t logs {trial}` shows all that it printed." in result.stdout


def test_json_is_alone_on_stdout_while_following(mastered: Any, code: Path) -> None:
    result = mastered("e", "create", code / "config.yaml", "-f", "--json")
    assert json.loads(result.stdout)["name"] == "small"
    assert "is COMPLETED after" in result.stderr


def test_without_a_directory_the_config_s_own_is_sent(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    result = mastered("e", "create", code / "config.yaml", "-f", cwd=tmp_path)
    assert "Sent 2 files (" in result.stderr
    assert f") from {code}\n" in result.stderr
    assert "is COMPLETED after" in result.stdout


def test_with_a_working_directory_nothing_is_sent(mastered: Any, code: Path) -> None:
    options = ["--config", f"environment.working_dir={code}", "-f"]
    result = mastered("e", "create", code / "config.yaml", *options)
    assert "Sent no files" in result.stderr
    assert "is COMPLETED after" in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("num_slots", [2, 1])
def test_an_experiment_without_slots_says_who_has_them(
    mastered: Any, code: Path, num_slots: int
) -> None:
    """A drained slot does not count."""
    if num_slots == 1:
        mastered("slot", "drain", "local", 1)
    options = ("data={steps: 999, pause_s: 0.2}", f"resources.slots_per_trial={num_slots}")
    first = create(mastered, code, *(part for one in options for part in ("--config", one)))["id"]
    first_trial(mastered, first)
    described = mastered("e", "describe", first).stdout
    [line] = [line for line in described.splitlines() if line.startswith("Runs on")]
    assert line.split(None, 2)[2].strip() == "local (1 trial)"
    second = create(mastered, code)["id"]
    text = mastered("e", "describe", second).stdout
    assert "Runs on" not in text
    words = " ".join(text.split())
    told = f"waiting for 1 slot; 0 of {num_slots} free, held by experiment {first}. It waits until"
    assert told in words
    assert "QUEUED" in mastered("e", "lt", second).stdout
    listed = json.loads(mastered("e", "list", "--state", "queued", "--json").stdout)
    assert [e["id"] for e in listed] == [second]
    assert "STOPPING_" not in mastered("e", "cancel", first).stdout
    mastered("e", "kill", first)
    if num_slots == 1:
        mastered("slot", "resume", "local", 1)
    mastered("e", "wait", second)


def test_the_slots_of_an_experiment_are_limited_and_no_longer(mastered: Any, code: Path) -> None:
    experiment = create(mastered, code, "--config", "data={steps: 999, pause_s: 0.2}")["id"]
    for given, told in (("1", "1 slot"), ("3", "3 slots"), ("none", "as many slots as there are")):
        changed = mastered("e", "set-max-slots", experiment, given)
        assert changed.stdout == f"Experiment {experiment} may use {told} at a time.\n"
    for wrong in ("0", "many"):
        refused = mastered("e", "set-max-slots", experiment, wrong, code=1)
        assert f"must be a number above 0, or none, but got {wrong!r}" in refused.stderr
    mastered("e", "kill", experiment)


def test_an_unknown_group_of_metrics_lists_the_known_ones(mastered: Any, code: Path) -> None:
    experiment = create(mastered, code)["id"]
    mastered("e", "wait", experiment)
    trial = json.loads(mastered("e", "lt", experiment, "--json").stdout)[0]["id"]
    errors = mastered("t", "metrics", trial, "-g", "foo", code=1).stderr
    assert "(training, validation), but got 'foo'" in errors


def test_cancel_ends_wait_with_1(mastered: Any, code: Path) -> None:
    experiment = create(mastered, code, "--config", "data={steps: 1500, pause_s: 0.2}")["id"]
    first_trial(mastered, experiment)
    mastered("e", "cancel", experiment)
    assert "CANCELED" in mastered("e", "wait", experiment, code=1).stdout


def test_a_paused_experiment_starts_when_activated_and_can_be_killed(
    mastered: Any, code: Path
) -> None:
    experiment = create(mastered, code, "--paused")["id"]
    listed = json.loads(mastered("e", "list", "--json").stdout)
    assert {e["id"]: e["state"] for e in listed}[experiment] == "PAUSED"
    mastered("e", "kill", experiment)
    assert "CANCELED" in mastered("e", "wait", experiment, code=1).stdout


def test_a_trial_is_looked_at_and_continued(mastered: Any, code: Path, tmp_path: Path) -> None:
    experiment = create(mastered, code)["id"]
    mastered("e", "wait", experiment)
    trial = json.loads(mastered("e", "list-trials", experiment, "--json").stdout)[0]["id"]

    rows = [json.loads(x) for x in mastered("t", "metrics", trial, "--json").stdout.splitlines()]
    assert [r["steps_completed"] for r in rows if r["group"] == "validation"] == [1, 2, 3]
    assert mastered("t", "logs", trial).stdout.splitlines() == ["step 1", "step 2", "step 3"]
    assert mastered("t", "logs", trial, "--tail", 1).stdout == "step 3\n"
    assert mastered("t", "logs", trial, "--search", "2", "-f").stdout == "step 2\n"
    assert mastered("e", "logs", experiment).stdout.splitlines()[-1] == "step 3"

    mastered("t", "download", trial, "-o", tmp_path / "best")
    assert (tmp_path / "best" / "state.txt").read_text() == "3"

    more = ["--config", "data.steps=5", "-f"]
    followed = mastered("t", "continue", trial, *more).stdout
    assert f"continues trial {trial}" in followed
    assert "is COMPLETED" in followed


@pytest.mark.long
def test_checkpoints_are_listed_fetched_and_deleted(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    experiment = create(mastered, code, "--config", "checkpoint_storage.save_trial_latest=2")["id"]
    mastered("e", "wait", experiment)
    listing = ("c", "list", experiment, "--best", "--json")
    told = wait_for_output(mastered, *listing, has=lambda output: len(json.loads(output)) < 3)
    found = json.loads(told)
    assert [c["steps_completed"] for c in found] == [3, 2]
    uuid = found[0]["uuid"]
    assert uuid in mastered("e", "lc", experiment).stdout
    assert "state.txt" in mastered("c", "describe", uuid).stdout
    for mode in ("direct", "master"):
        target = tmp_path / mode
        assert mastered("c", "download", uuid, "-o", target, "--mode", mode).stdout == f"{target}\n"
        assert (target / "state.txt").read_text() == "3"
    again = mastered("c", "download", uuid, "-o", tmp_path / "direct", code=1)
    assert "must be a new or empty directory" in again.stderr
    glob = ("--glob", "*.none", "--glob", "more.*", "--yes")
    assert mastered("c", "delete", uuid, *glob).stdout == f"Deleted 1 files of {uuid}.\n"
    data = json.loads(mastered("c", "describe", uuid, "--json").stdout)
    assert (data["state"], data["resources"], data["size"]) == (
        "PARTIALLY_DELETED", {"state.txt": 1}, 1,
    )  # fmt: skip
    assert uuid in mastered("c", "list", experiment).stdout
    mastered("c", "download", uuid, "-o", tmp_path / "partial", "--mode", "master")
    assert [path.name for path in (tmp_path / "partial").iterdir()] == ["state.txt"]
    assert (
        "must be a pattern" in mastered("c", "delete", uuid, "--glob", "", "--yes", code=1).stderr
    )
    mastered("c", "delete", uuid, "--yes")
    gone = mastered("c", "delete", uuid, code=1)
    assert "they were deleted before" in gone.stderr
    assert "Delete the files" not in gone.stdout
    assert uuid not in mastered("c", "list", experiment).stdout
    assert uuid in mastered("c", "list", experiment, "--deleted").stdout
    assert "was deleted" in mastered("c", "download", uuid, "-o", tmp_path / "x", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["e", "describe", 10_000], "There is no experiment 10000"),
        (["t", "logs", 10_000], "There is no trial 10000"),
        (["c", "describe", "nothing"], "There is no checkpoint 'nothing'"),
        (["e", "create", "missing.yaml"], "missing.yaml"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(
    mastered: Any, arguments: list[object], message: str
) -> None:
    result = mastered(*arguments, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 2


def test_a_config_with_a_typo_names_the_field(mastered: Any, code: Path) -> None:
    (code / "config.yaml").write_text(
        "entrypoint: python3 train.py\nsearcher: {name: single}\nx: 1"
    )
    result = mastered("e", "create", code / "config.yaml", code, code=1)
    assert "Error: `x` is not a known field, got 1." in result.stderr
    assert "`searcher.metric`" in result.stderr


def test_a_directory_with_a_link_that_leads_outside_is_refused(mastered: Any, code: Path) -> None:
    (code / "data").symlink_to("/etc")
    result = mastered("e", "create", code / "config.yaml", code, code=1)
    assert "lead outside: data -> /etc" in result.stderr


def test_ctrl_c_leaves_the_experiment_running(mastered: Any, code: Path) -> None:
    home = json.loads(mastered("status", "--json").stdout)["home"]
    options = ["--config", "data={steps: 1500, pause_s: 0.2}", "-f"]
    command = ["e", "create", str(code / "config.yaml"), str(code), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *command],
        env={**os.environ, "PACELINE_HOME": home},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "step 1\n":
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "running" in errors
    assert "Traceback" not in errors
    newest = json.loads(mastered("e", "list", "--json", "--limit", 1).stdout)[0]
    assert newest["state"] == "RUNNING"
    mastered("e", "kill", newest["id"])


def test_without_a_master_the_exact_command_is_given(paceline: Any) -> None:
    result = paceline("e", "list", code=1)
    assert result.stderr.splitlines()[1] == "Hint: start one with `paceline up --detach`."


def test_down_without_a_master_is_no_error(paceline: Any) -> None:
    assert paceline("down").stdout.startswith("No master runs in ")


@pytest.mark.long
def test_a_port_already_taken_is_told_by_up_in_both_forms(paceline: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for options in ([], ["--detach"]):
            result = paceline("up", "--port", port, *options, code=1)
            # A busy machine may take long to tell.
            told = result.stderr.splitlines()
            assert [line for line in told if not line.startswith("Waiting for")] == [
                f"Error: The port must be free, but another program listens on 127.0.0.1:{port}.",
                "Hint: `--port 0` takes any free one.",
            ]


def test_a_host_that_others_can_reach_is_refused(paceline: Any) -> None:
    assert "`host` must be a loopback address" in paceline("up", "--host", "0.0.0.0", code=1).stderr


def test_down_ends_the_master_and_its_trials(paceline: Any, code: Path, tmp_path: Path) -> None:
    told = paceline("up", "--detach", "--port", 0, "--slots", 1).stdout
    assert not has_web_ui() or "Sign in: http://" in told
    master = json.loads((tmp_path / "home" / "master.json").read_text())["pid"]
    experiment = create(paceline, code, "--config", "data={steps: 3000, pause_s: 0.1}")["id"]
    first_trial(paceline, experiment)
    assert "Stopped the master" in paceline("down", "--timeout", 10).stdout
    # A log may be shown to others.
    log = (tmp_path / "home" / "master.log").read_text()
    assert "The master runs at http://" in log
    assert "Sign in" not in log
    home = str(tmp_path / "home")
    left = [p.info for p in psutil.process_iter(["cmdline", "status"]) if home in str(p.info)]
    assert [p for p in left if p["status"] != psutil.STATUS_ZOMBIE] == []
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(master).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_trials_that_go_on_without_a_master_are_counted(
    paceline: Any, code: Path, tmp_path: Path
) -> None:
    paceline("up", "--detach", "--port", 0, "--slots", 1)
    experiment = create(paceline, code, "--config", "data={steps: 3000, pause_s: 0.1}")["id"]
    first_trial(paceline, experiment)
    told = "1 trial goes on without a master"
    assert told in paceline("down", "--keep-trials").stderr
    assert told in paceline("status", code=1).stderr
    master = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "up", "--port", "0", "--slots", "1"],
        env={**os.environ, "PACELINE_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert master.stdout is not None
    assert "Ctrl-C stops it" in master.stdout.readline()
    master.send_signal(signal.SIGINT)
    output, _ = master.communicate(timeout=120)
    assert "Stopping: 1 trial gets up to 30 s to store checkpoints" in output
    assert told not in paceline("status", code=1).stderr


@pytest.mark.long
def test_ctrl_c_drains_from_the_moment_on_that_the_address_is_told(
    paceline: Any, code: Path, tmp_path: Path
) -> None:
    paceline("up", "--detach", "--port", 0, "--slots", 1)
    experiment = create(paceline, code, "--config", "data={steps: 3000, pause_s: 0.1}")["id"]
    first_trial(paceline, experiment)
    paceline("down", "--keep-trials")
    script = """
import os, signal, sys
from paceline.cli import main
from paceline._cluster.master.home_directory import Home
write_address = Home.write_address
def write_and_interrupt(*arguments):
    write_address(*arguments)
    os.kill(os.getpid(), signal.SIGINT)
Home.write_address = write_and_interrupt
sys.argv = ["paceline", "up", "--port", "0", "--slots", "1"]
main()
"""
    master = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PACELINE_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Stopping: 1 trial gets up to 30 s to store checkpoints" in master.stdout
    assert "without a master" not in paceline("status", code=1).stderr


@pytest.mark.long
def test_create_starts_a_master_on_a_free_port(paceline: Any, code: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 8080))
            other.listen()
        except OSError:
            pass  # Another program has it, which serves as well.
        try:
            result = paceline("e", "create", code / "config.yaml", "--start-master", "-f")
            assert "(port 8080 is taken)" in result.stderr
            assert "is COMPLETED" in result.stdout
        finally:
            paceline("down", "--timeout", 1)


@pytest.mark.long
def test_a_master_started_for_a_create_that_fails_ends_again(paceline: Any, code: Path) -> None:
    (code / "data").symlink_to("/etc")
    result = paceline("e", "create", code / "config.yaml", "--start-master", code=1)
    assert "Stopped the master again." in result.stderr
    assert paceline("down").stdout.startswith("No master runs in ")


def test_runs_that_show_nothing_are_said_with_where_runs_are(mastered: Any, tmp_path: Path) -> None:
    def told(directory: str) -> str:
        return str(mastered("up", "--detach", "--runs", tmp_path / directory).stderr)

    (tmp_path / "desk" / "paceline_runs" / "one").mkdir(parents=True)
    assert "shows nothing yet" in told("desk")
    (tmp_path / "desk" / "paceline_runs" / "one" / "run.json").touch()
    assert f"Hint: `--runs {tmp_path / 'desk' / 'paceline_runs'}` shows runs" in told("desk")
    assert "shows nothing" not in told("desk/paceline_runs")
    (tmp_path / "logs" / "lr=1").mkdir(parents=True)
    (tmp_path / "logs" / "lr=1" / "events.out.tfevents.1.host").touch()
    assert "shows nothing" not in told("logs")
