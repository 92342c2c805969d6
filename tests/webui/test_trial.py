"""A trial's page: forks of its checkpoints, lineage, its curve on a phone; what is selected."""

import re
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

PHONE = {"width": 390, "height": 844}
TRAIN = """
import paceline

with paceline.core.init() as context:
    rate = paceline.get_cluster_info().trial.hparams["rate"]
    start = 0
    if context.latest_checkpoint:
        with context.checkpoint.restore_path(context.latest_checkpoint) as path:
            start = int((path / "state.txt").read_text())
    for step in (1, 2, 3):
        context.train.report_validation_metrics(step, {"loss": rate / step, "start": start})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "state.txt").write_text(f"{step}")
"""


# Not for the module: its tests need not run one after the other.
@pytest.fixture(scope="session")
def trained(master: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return an ended experiment whose trial has three checkpoints."""
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text(TRAIN)
    hparams = {"rate": {"type": "double", "minval": 1.0, "maxval": 2.0}, "other": 1}
    searcher = {"name": "random", "metric": "loss", "max_trials": 1}
    experiment = master.create(
        code, name="with checkpoints", hyperparameters=hparams, searcher=searcher,
        checkpoint_storage={"save_trial_latest": 3},
    )  # fmt: skip
    assert experiment.wait(0.1).value == "COMPLETED"
    return experiment


@pytest.mark.long
def test_a_trial_is_forked_from_any_checkpoint_with_one_value_changed(
    master: Any, trained: Any, open_page: Any
) -> None:
    """From the second of three checkpoints; the lineage tells of it on both pages."""
    [trial] = trained.trials()
    [second] = [one for one in trial.checkpoints() if one.steps_completed == 2]
    page = open_page(master, f"/trials/{trial.id}/checkpoints")
    page.get_by_role("row").filter(has_text=second.uuid).get_by_role("button", name="file").click()
    page.get_by_role("link", name="Fork from here").click()
    expect(page.get_by_role("heading", name=f"Fork trial {trial.id}")).to_be_visible()
    page.get_by_role("combobox", name="Hyperparameter").click()
    page.get_by_role("option", name="rate", exact=True).click()
    page.get_by_role("textbox", name="Value").fill("8.5")
    page.get_by_role("button", name="Change it").click()
    expect(page.get_by_text("Valid. It would train 1 trial")).to_be_visible()
    page.get_by_role("button", name="Create and start").click()
    expect(page).to_have_url(re.compile(f"/experiments/(?!{trained.id}$)[0-9]+$"))
    fork = master.client.get_experiment(int(page.url.rsplit("/", 1)[1]))
    assert fork.wait(0.1).value == "COMPLETED"
    assert fork.config["hyperparameters"] == {"rate": 8.5, "other": 1}
    [began] = fork.trials()
    first = next(iter(began.iter_metrics("validation")))
    assert first.metrics == {"loss": 8.5, "start": 2}, "it began with the second checkpoint"

    page.goto(f"/trials/{trial.id}/lineage")
    expect(page.get_by_text("1 experiment began from its checkpoints")).to_be_visible()
    page.get_by_role("link", name=f"({fork.id})").first.click()
    page.goto(f"/trials/{began.id}/lineage")
    expect(page.get_by_text(f"It began from checkpoint {second.uuid[:8]}.")).to_be_visible()
    expect(page.get_by_role("region", name="Lineage")).to_contain_text("forked from checkpoint")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["trials", "experiments"])
def test_a_phone_shows_state_and_curve_without_scrolling(
    master: Any, trained: Any, open_page: Any, kind: str
) -> None:
    """Further facts and options of charts wait behind buttons there."""
    number = trained.trials()[0].id if kind == "trials" else trained.id
    page = open_page(master, f"/{kind}/{number}", viewport=PHONE)
    chart = page.locator("canvas").first
    expect(chart).to_be_visible()
    assert page.get_by_text("Completed").first.bounding_box()["y"] < PHONE["height"] / 4
    box = chart.bounding_box()
    assert box["y"] < 0.6 * PHONE["height"], f"the curve begins at {box['y']}"
    expect(page.get_by_text("Duration", exact=True).first).to_be_hidden()
    page.get_by_role("button", name="More", exact=True).click()
    expect(page.get_by_text("Duration", exact=True).first).to_be_visible()
    expect(page.get_by_role("switch", name="Log scale")).to_be_hidden()
    page.get_by_role("button", name="Chart options").click()
    left = page.get_by_role("combobox", name="X axis").bounding_box()["x"]
    assert left < 40, f"options must have the whole width, but begin at {left=}"
    page.get_by_role("switch", name="Log scale").click()
    expect(page).to_have_url(re.compile("log=true"))


def test_the_selection_of_a_list_is_part_of_its_address(
    master: Any, trained: Any, open_page: Any
) -> None:
    """A link shows the same rows chosen, and what can be done with them."""
    page = open_page(master, "/experiments?q=with+checkpoints")
    page.get_by_role("checkbox", name="Select with checkpoints", exact=True).check()
    expect(page).to_have_url(re.compile(f"selected=.*{trained.id}"))
    page.reload()
    box = page.get_by_role("checkbox", name="Select with checkpoints", exact=True)
    expect(box).to_be_checked()
    expect(page.get_by_role("button", name="With 1 selected experiment")).to_be_visible()
    box.uncheck()
    expect(page).not_to_have_url(re.compile("selected"))


def test_a_fork_of_a_trial_that_is_not_there_says_so(master: Any, open_page: Any) -> None:
    """Before anything is made."""
    page = open_page(master, "/new?trial=999999&checkpoint=none")
    expect(page.get_by_role("alert")).to_contain_text("There is no trial 999999")


# What the trainers of four ranks and the samplers of two nodes report.
UNEVEN = """
import paceline

with paceline.core.init() as context:
    for step in range(10, 60, 10):
        slow = 2 if step < 50 else 0
        parts = {"mean_forward_s": 0.3, "mean_data_wait_s": 0.1, "max_forward_s": 0.5}
        told = {"slowest_rank": slow, "slowest_rank_lag_s": 0.1}
        context.train.report_metrics("profiling", step, parts | told)
        gpus = {"gpu_0_percent": 92.0, "gpu_1_percent": 1.5, "gpu_1_power_w": 60.0}
        context.train.report_metrics("system", step, gpus)
        context.train.report_metrics("system_rank_2", step, {"gpu_0_percent": 88.0})
"""


@pytest.mark.long
def test_the_profiler_names_the_slowest_rank_and_idle_gpus(
    master: Any, open_page: Any, find_problems: Any, tmp_path: Any
) -> None:
    """Who holds up the others, by how much of a batch, and which GPU does nothing."""
    (tmp_path / "train.py").write_text(UNEVEN)
    experiment = master.create(tmp_path, name="uneven")
    experiment.wait(0.1)
    (trial,) = experiment.trials()
    page = open_page(master, f"/trials/{trial.id}/profiler", viewport=PHONE)
    card = page.get_by_role("region", name="Stragglers and idle GPUs")
    expect(card).to_contain_text(
        "Rank 2 was the slowest in 80 % of the reports, by 100 ms per batch beyond the mean of all"
        " ranks (25 % of a batch): the others wait for it."
    )
    expect(card).to_contain_text("1 of 3 GPUs idle: GPU 1 (used 1.5 % of the time).")
    assert find_problems(page) == []
