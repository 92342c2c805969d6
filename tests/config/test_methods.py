"""Search methods of other packages, and packages that are broken."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODULE = """
from typing import Literal
from paceline.config import Searcher
from pydantic import Field

class Good(Searcher):
    name: Literal["good"] = Field(default="good", description="Search method.")
    num_waves: int = Field(ge=1, description="Waves of trials.")

class Random(Searcher):
    name: Literal["random"] = "random"

NOTHING = 3
"""
ENTRY_POINTS = """[paceline.search_methods]
good = methods_of_a_test:Good
misnamed = methods_of_a_test:Good
random = methods_of_a_test:Random
number = methods_of_a_test:NOTHING
missing = methods_that_are_not_there:Good
"""
SCRIPT = """
import json, logging, sys
logging.basicConfig(stream=sys.stdout)
from paceline.config import ConfigError, json_schema, validate_config

def check(searcher):
    try:
        return validate_config({"entrypoint": "x", "searcher": searcher}).searcher.model_dump()
    except ConfigError as error:
        return str(error)

for searcher in json.loads(sys.argv[1]):
    print("CHECKED", json.dumps(check(searcher)))
print("SCHEMA", sorted(json_schema()["$defs"]))
"""


@pytest.fixture
def check(tmp_path: Path) -> Any:
    """Return a function that checks searchers where a package adds methods."""
    (tmp_path / "methods_of_a_test.py").write_text(MODULE)
    info = tmp_path / "methods_of_a_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: methods-of-a-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)

    def run(*searchers: dict[str, Any]) -> tuple[list[Any], str]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(searchers)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        values = [json.loads(line[8:]) for line in lines if line.startswith("CHECKED ")]
        return values, done.stdout

    return run


def test_a_method_of_a_package_is_checked_like_our_own(check: Any) -> None:
    good = {"name": "good", "metric": "loss"}
    (found, missing, low, close), said = check(
        {**good, "num_waves": 2}, good, {**good, "num_waves": 0}, {"name": "godd", "metric": "a"}
    )
    assert (found["name"], found["num_waves"], found["stop_timeout"]) == ("good", 2, 30.0)
    assert missing == "`searcher.num_waves` is required: waves of trials, got nothing."
    assert low.startswith("`searcher.num_waves` must be an integer >= 1, got 0.")
    assert "`pbt` or `good`. Hint: did you mean `good`?" in close
    assert "'Good'" in said.splitlines()[-1]


def test_a_method_that_cannot_be_used_is_told_and_costs_the_others_nothing(check: Any) -> None:
    (own, number), said = check(
        {"name": "random", "metric": "loss", "max_trials": 3}, {"name": "number", "metric": "loss"}
    )
    assert own["max_trials"] == 3
    assert "'random' of methods_of_a_test:Random is ignored, as there is one of that name" in said
    assert "`searcher.name` is not known" in number
    for name, why in (
        ("misnamed", "the default of its field `name` must be 'misnamed', but is 'good'"),
        ("number", "it must be a subclass of `Searcher`, but is 3"),
        ("missing", "No module named 'methods_that_are_not_there'"),
    ):
        (line,) = [line for line in said.splitlines() if f"method '{name}' (" in line]
        assert "cannot be loaded" in line
        assert why in line
