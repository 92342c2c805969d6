"""A search that runs while one looks at it."""

import re
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

# Each epoch waits until the file `go` is there.
SEARCHED = """
import time
from pathlib import Path

import paceline

with paceline.core.init() as context:
    hparams = paceline.get_cluster_info().trial.hparams
    for epoch in range(1, 5):
        while not Path("go").exists() and not context.preempt.should_preempt():
            time.sleep(0.02)
        metrics = {"test_loss": hparams["rate"] + 1 / epoch, "epochs": epoch}
        context.train.report_validation_metrics(epoch, metrics)
        if context.preempt.should_preempt():
            break
"""


@pytest.mark.long
def test_rungs_and_hyperparameters_fill_while_the_search_runs(
    master: Any, open_page: Any, code: Path, unfold: Any
) -> None:
    (code / "train.py").write_text(SEARCHED)
    searcher = {
        "name": "async_halving", "metric": "test_loss", "time_metric": "epochs", "max_time": 4,
        "max_trials": 6, "num_rungs": 2, "divisor": 2,
    }  # fmt: skip
    hparams = {
        "rate": {"type": "double", "minval": 0.0, "maxval": 1.0},
        "layers": {"type": "int", "minval": 1, "maxval": 4},
        "has_bias": {"type": "categorical", "vals": [True, False]},
    }
    experiment = master.create(code, name="live", searcher=searcher, hyperparameters=hparams)
    page = open_page(master, f"/experiments/{experiment.id}")
    unfold(page, "More")
    expect(page.get_by_text("2 running")).to_be_visible()
    page.get_by_role("link", name="Rungs").click()
    bracket = page.get_by_role("region", name="Bracket 1")
    expect(bracket.get_by_text("on its way", exact=True)).to_have_count(6)
    (code / "go").touch()

    # Every decision is told: some stop at the first rung, the rest reach the full length.
    expect(bracket.get_by_text("stopped here", exact=True).first).to_be_visible()
    expect(bracket.get_by_text("full length", exact=True).first).to_be_visible()
    expect(page.locator("header").get_by_text("Completed")).to_be_visible()
    stopped = sum(
        entry.decision == "stopped" for rung in experiment.search().brackets[0]
        for entry in rung.entries
    )  # fmt: skip
    expect(bracket.get_by_text("stopped here", exact=True)).to_have_count(stopped)
    # Each decision says what it was made from: the first one to arrive is the best of one.
    expect(bracket.get_by_text("Arrived as number 1, rank 1: the best 1 goes on")).to_have_count(1)
    expect(bracket.get_by_text("Arrived as number 6, rank")).to_have_count(1)

    # The table of hyperparameters has every trial, the best first, and one can choose some.
    page.get_by_role("link", name="Hyperparameters").click()
    expect(page.get_by_role("img", name=re.compile("^Parallel coordinates of 6"))).to_be_visible()
    expect(page.get_by_text("All 6 trials, the best first")).to_be_visible()
    best = experiment.reload().data.best_trial_id
    expect(page.get_by_role("row").nth(1).get_by_role("link")).to_have_text(str(best))
    expect(page.get_by_role("cell", name=re.compile("^(true|false)$"))).to_have_count(6)
    page.get_by_role("radiogroup", name="Chart").get_by_text("Heat map").click()
    expect(page).to_have_url(re.compile("view=heat"))
    expect(page.get_by_role("img", name=re.compile("^Mean test_loss by"))).to_have_count(3)

    # Two trials are chosen in the table and compared.
    page.get_by_role("link", name="Trials 6").click()
    # The page before has such boxes as well, and stays until this one is there.
    expect(page.get_by_role("img", name=re.compile("^Mean test_loss by"))).to_have_count(0)
    for number in (1, 2):
        page.get_by_role("checkbox").nth(number).check()
    page.get_by_role("button", name="Compare selected").click()
    expect(page.get_by_role("img", name=re.compile("^test_loss: 2 lines"))).to_be_visible()
    page.get_by_role("radiogroup", name="View").get_by_text("What differs").click()
    expect(page.get_by_role("cell", name="rate", exact=True)).to_be_visible()
    page.go_back()
    expect(page).to_have_url(re.compile(f"/experiments/{experiment.id}/trials"))


OF_TWO = """
import paceline

with paceline.core.init() as context:
    x = paceline.get_cluster_info().trial.hparams["x"]
    score = float("nan") if x > 0.7 else x
    context.train.report_validation_metrics(1, {"loss": x * x, "score": score})
"""


@pytest.mark.long
def test_a_search_of_two_objectives_shows_its_pareto_front(
    master: Any, open_page: Any, code: Path
) -> None:
    """What is dominated, and what is not finite, is not there; nothing is called the best."""
    (code / "train.py").write_text(OF_TWO)
    objectives = [{"metric": "loss"}, {"metric": "score", "smaller_is_better": False}]
    searcher = {
        "name": "random", "max_trials": 4, "objectives": objectives,
        "points_to_evaluate": [{"x": x} for x in (0.25, 0.5, 0.9, -0.5)],
    }  # fmt: skip
    experiment = master.create(
        code, searcher=searcher,
        hyperparameters={"x": {"type": "double", "minval": -1, "maxval": 1}},
    )  # fmt: skip
    assert experiment.wait(timeout=120).value == "COMPLETED"
    page = open_page(master, f"/experiments/{experiment.id}")
    front = page.get_by_role("table", name="Pareto front")
    expect(front.get_by_role("columnheader")).to_have_text(["Trial", "loss ↓", "score ↑", "x"])
    expect(front).to_contain_text("0.0625")
    expect(front.get_by_role("link")).to_have_count(2)
    expect(page.get_by_text("★ best")).to_have_count(0)
    expect(page.get_by_text("Best trial")).to_have_count(0)
