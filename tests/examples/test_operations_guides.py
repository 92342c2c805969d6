"""Commands and names of the guides for people who keep a master running."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from guides import ROOT, Guide

from paceline._cluster.messages.states import ShownState

OPERATIONS = Guide("docs/operations.md")
DURABILITY = Guide("docs/durability.md")
CLI = Guide("docs/cli.md")
CONFIG = """
entrypoint: python3 train.py
searcher: {name: single, metric: loss}
"""
# It runs until there is a file.
TRAIN = """
import time
from pathlib import Path
import paceline

with paceline.core.init() as context:
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "weights").write_text("weights")
    context.train.report_validation_metrics(1, {"loss": 1.0})
    while not Path("END").exists():
        time.sleep(0.05)
"""

Shell = Callable[[str], str]


@pytest.fixture
def shell(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[Shell]:
    """Return a function that runs a command line, in a machine's home that is empty."""
    paths = f"{Path(sys.executable).parent}:{clean_environment['PATH']}"
    environment = {**clean_environment, "HOME": str(tmp_path), "PATH": paths, "COLUMNS": "300"}

    def run(line: str) -> str:
        line = line.replace("paceline up --detach", "paceline up --detach --port 0 --slots 1")
        line = line.replace("/mnt/other-disk", f"{tmp_path}/disk")
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=environment, text=True, timeout=100,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stdout)
        return done.stdout

    yield run
    run("paceline down")


def plain(text: str) -> str:
    """Return text without numbers, sizes, times, addresses and what depends on numbers."""
    text = re.sub(r"http://[\w.:]+|'?/\S*|~\S*", "PLACE", text)
    text = re.sub(r"\d[\d.:T -]*(B|KiB|MiB)?\b ?", "N ", text)
    return re.sub(r"\b(checkpoint|trial|experiment|difference|file|goe)s\b", r"\1", text)


def follow(session: str, shell: Shell) -> None:
    """Run the commands of a console session, and compare what they print."""
    for part in session.split("$ ")[1:]:
        command, _, shown = part.partition("\n")
        printed = shell(command)
        if shown:
            assert plain(printed).splitlines() == plain(shown).splitlines(), command


@pytest.mark.long
def test_a_home_is_backed_up_repaired_and_restored(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("END", str(tmp_path / "end")))
    (tmp_path / "experiment.yaml").write_text(CONFIG)
    shell("paceline up --detach")
    shell("paceline e create experiment.yaml")
    while "loss" not in shell("paceline t describe 1"):
        time.sleep(0.1)
    check, lost, backup, restore = DURABILITY.blocks("console")
    (tmp_path / ".paceline" / "master.sqlite").unlink()
    while "paceline home check --fix" not in shell("paceline status"):
        time.sleep(0.1)
    follow(lost, shell)
    (tmp_path / "end").touch()
    shell("paceline e wait 1")
    follow(backup, shell)
    follow(restore, shell)
    shell("paceline down")
    follow(check, shell)


@pytest.mark.long
def test_what_prometheus_is_told_is_listed(shell: Shell, tmp_path: Path) -> None:
    shell("paceline up --detach")
    [session] = OPERATIONS.blocks("console")
    token = shell(session.removeprefix("$ ")).split()[0]
    url = re.search(r"http://\S+", shell("paceline status"))
    assert url
    request = urllib.request.Request(
        f"{url[0]}/api/v1/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as answer:
        told = set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))
    table = OPERATIONS.text.partition("| Metric | What it counts |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`((?:paceline|process)_\w+)", table))
    # It is told once a record has come.
    assert listed - told == {"paceline_ingest_newest_lag_seconds"}
    assert told <= listed
    shown = shell("paceline status")
    table = OPERATIONS.text.partition("| Line | Meaning |")[2].partition("\n\n")[0]
    for line in re.findall(r"^\| (\w[\w ]*) \|", table, re.MULTILINE):
        assert line in shown


def test_the_rules_for_prometheus_are_yaml() -> None:
    scrape, rules = (yaml.safe_load(block) for block in OPERATIONS.blocks("yaml"))
    # Without a path of its own, Prometheus asks at `/metrics`.
    assert scrape["scrape_configs"][0].keys() == {"job_name", "authorization", "static_configs"}
    names = {name for rule in rules for name in re.findall(r"paceline_\w+", rule["expr"])}
    table = OPERATIONS.text.partition("| Metric | What it counts |")[2].partition("\n\n")[0]
    assert {name.removesuffix("_bucket") for name in names} <= set(re.findall(r"\w+", table))


def test_every_state_is_listed() -> None:
    table = CLI.text.partition("## States")[2].partition("## Words")[0]
    rows = re.findall(r"^\| ([A-Z, ]+) \|", table, re.MULTILINE)
    assert {state for row in rows for state in row.split(", ")} == {*ShownState.__members__}


def test_the_variables_that_are_listed_are_read() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in set(re.findall(r"`(PACELINE_\w+)", CLI.text)):
        # These are put together.
        assert re.sub(r"STORE_(FILE|CHECKPOINT)", "STORE_PART", name) in source
