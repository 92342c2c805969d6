"""Bad input and faults: what a page shows when something is not as it should be."""

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

MARKUP = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"
REPORTS = """
import paceline

with paceline.core.init() as context:
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 0.5, -0.25], 1):
        context.train.report_validation_metrics(10 * step, {"test_loss": loss, NAME: step})
        context.train.report_training_metrics(10 * step, {"lr": step} if step % 2 else {"x": step})
        print(NAME, flush=True)
"""


# Not for the module: its tests need not run one after the other.
@pytest.fixture(scope="session")
def marked(master: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return an ended experiment with markup, huge and odd values wherever one can write."""
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text(f"NAME = {MARKUP!r}\n{REPORTS}")
    hparams = {MARKUP: MARKUP, "huge": "long " * 20_000, "list": [1, [2, None]], "flag": False}
    experiment = master.create(
        code, name=MARKUP, description=MARKUP, labels=[MARKUP], hyperparameters=hparams
    )
    assert experiment.wait(0.1).value == "COMPLETED"
    return experiment


@pytest.mark.long
def test_markup_is_shown_as_text(master: Any, marked: Any, open_page: Any) -> None:
    (trial,) = marked.trials()
    of_experiment, of_trial = f"/experiments/{marked.id}", f"/trials/{trial.id}"
    tabs = ["", "/trials", "/code", "/hyperparameters", "/logs"]
    page = open_page(master)
    for path in [
        "/", "/experiments", *(of_experiment + tab for tab in tabs), of_trial,
        f"{of_trial}/hyperparameters", f"/compare?trials=[{trial.id}]&all=true",
    ]:  # fmt: skip
        page.goto(path)
        expect(page.get_by_text(MARKUP).first).to_be_visible()
        expect(page.locator("img[src=x], b")).to_have_count(0)
        assert page.evaluate("document.title") != "run", path
        # However long a value is, the page itself is no wider than the window.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


# The second line of three is damaged.
LOSE = """
import os
from pathlib import Path
from paceline._base.journal_reading_and_writing import frame_line, segment_name
from paceline._base.journal_records import encode_record
from paceline.journal import StatusReported

lines = [frame_line(-1, b'{"journal_version":1,"time":0.0}')]
for number in range(3):
    record = encode_record(StatusReported(time=0.0, status=f"number {number}"))
    lines.append(frame_line(number, record))
lines[2] = lines[2].replace(b"number", b"nomber")
directory = Path(os.environ["PACELINE_RUN_DIR"]) / "journal" / "a1.g0.r0"
directory.mkdir(parents=True)
(directory / segment_name(0)).write_bytes(b"".join(lines))
"""


@pytest.mark.long
def test_lost_records_are_told_by_the_pages_of_trial_and_experiment(
    master: Any, marked: Any, open_page: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOSE)
    experiment = master.create(tmp_path)
    assert experiment.wait(0.1).value == "COMPLETED"
    (trial,) = experiment.trials()
    page = open_page(master)
    for path in (f"/trials/{trial.id}", f"/experiments/{experiment.id}"):
        page.goto(path)
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("1 record is lost")
        alert.get_by_role("link", name="Read the logs").click()
        expect(page.get_by_text("Record 1 of rank 0 (generation 0) is lost")).to_be_visible()
    page.goto(f"/trials/{marked.trials()[0].id}")
    expect(page.get_by_role("heading", name="Trial").first).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.long
def test_damaged_lines_are_told_by_the_logs_of_trial_and_experiment(
    master: Any, open_page: Any, code: Path
) -> None:
    (code / "train.py").write_text("print('first')\nprint('second')\nprint('third')\n")
    experiment = master.create(code)
    experiment.wait(0.1)
    (trial,) = experiment.trials()
    log = master.home / "logs" / f"trial-{trial.id}" / "attempt-1.jsonl"
    log.write_bytes(log.read_bytes().replace(b"second", b"sacond"))
    page = open_page(master)
    for path in (f"/trials/{trial.id}/logs", f"/experiments/{experiment.id}/logs"):
        page.goto(path)
        expect(page.get_by_text("1 damaged line is left out")).to_be_visible()
        expect(page.get_by_text("third", exact=True)).to_be_visible()
        expect(page.get_by_text("sacond")).to_have_count(0)


def test_notes_keep_markup_as_it_was_typed(master: Any, marked: Any, open_page: Any) -> None:
    page = open_page(master, f"/experiments/{marked.id}/notes")
    page.get_by_role("textbox", name="Notes").fill(MARKUP)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_role("textbox", name="Notes")).to_have_value(MARKUP)


def test_values_that_are_no_numbers_leave_gaps(
    master: Any, marked: Any, open_page: Any, unfold: Any, scroll_to: Any
) -> None:
    (trial,) = marked.trials()
    page = open_page(master, f"/trials/{trial.id}?table=true")
    table = page.get_by_role("table", name="loss", exact=True)
    scroll_to(table)
    cells = table.locator("tbody td:last-child")
    expect(cells).to_have_text(["1", "–", "–", "0.5", "-0.25"])
    expect(page.get_by_role("definition").filter(has_text="-0.25 at batch 50")).to_be_visible()
    unfold(page)
    page.get_by_role("switch", name="As tables").click()
    chart = page.get_by_role("img", name=re.compile("^loss: 1 line"))
    scroll_to(chart)
    expect(chart).to_be_visible()


@pytest.mark.long
def test_addresses_of_what_is_not_there_say_so(master: Any, open_page: Any, code: Path) -> None:
    page = open_page(master)
    for path in ("/no/such/page", "/experiments/word", "/trials/-1"):
        page.goto(path)
        expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()
    for path in ("/trials/999999", "/compare?trials=[999999]"):
        page.goto(path)
        expect(page.get_by_role("alert")).to_contain_text("There is no trial 999999")
    experiment = master.create(code, name="gone")
    experiment.kill()
    experiment.wait(0.1)
    page.goto(f"/experiments/{experiment.id}/notes")
    page.get_by_role("textbox", name="Notes").fill("typed")
    experiment.delete()
    # Also under an open page, which offers nothing of it any more.
    expect(page.get_by_role("alert")).to_contain_text(f"There is no experiment {experiment.id}")
    page.goto(f"/experiments/{experiment.id}")
    expect(page.get_by_role("alert")).to_contain_text(f"There is no experiment {experiment.id}")


def test_a_run_of_another_trackers_client_is_found_at_the_address_that_it_prints(
    master: Any, open_page: Any
) -> None:
    """An address of MLflow's form leads to the run; no directory or lost output is spoken of."""
    reply = httpx2.post(
        f"{master.url}/api/2.0/mlflow/runs/create",
        headers={"Authorization": f"Bearer {(master.home / 'token').read_text().strip()}"},
        json={"experiment_id": "0", "run_name": "far"},
    )
    page = open_page(master, f"/#/experiments/0/runs/{reply.json()['run']['info']['run_id']}")
    expect(page.get_by_role("heading", name="far")).to_be_visible()
    expect(page.get_by_text("a run that another tracker's client logs here")).to_be_visible()
    page.get_by_role("link", name="Logs").click()
    expect(page.get_by_text("Attempt 1 of the run began at step 0.", exact=True)).to_be_visible()
    expect(page.get_by_text("stays where it was started")).to_have_count(0)


def test_a_script_that_fails_is_told_with_its_error(
    master: Any, open_page: Any, code: Path
) -> None:
    (code / "train.py").write_text("print('begins')\nraise ValueError('no such data set')\n")
    experiment = master.create(code, name="failing")
    experiment.wait(0.1)
    page = open_page(master, f"/experiments/{experiment.id}")
    alert = page.get_by_role("alert", name="The experiment failed")
    expect(alert).to_contain_text("exit code 1")
    alert.get_by_role("link", name="Read the logs").click()
    page.get_by_role("button", name="First error").click()
    expect(page.locator("[data-target]")).to_contain_text("Traceback")
    page.goto(f"/trials/{experiment.trials()[0].id}")
    expect(page.get_by_text("user: code or config")).to_be_visible()


@pytest.mark.long
def test_warnings_of_a_config_are_told_before_and_after_it_is_created(
    master: Any, open_page: Any, code: Path, write_config: Any
) -> None:
    page = open_page(master, "/new")
    write_config(
        page,
        "{name: warned, entrypoint: python3 train.py, searcher: {name: single, metric: test_loss},"
        f" environment: {{working_dir: {json.dumps(str(code))}}}, max_restarts: 0,"
        " optimizations: {auto_tune_tensor_fusion: false}}",
    )
    warning = page.get_by_role("note")
    expect(warning).to_contain_text("auto_tune_tensor_fusion")
    page.get_by_role("button", name="Create and start").click()
    expect(page).to_have_url(re.compile("/experiments/[0-9]+"))
    expect(page.get_by_role("heading", name="warned")).to_be_visible()
    expect(warning).to_contain_text("auto_tune_tensor_fusion")


@pytest.mark.long
def test_a_request_that_fails_says_what_to_do(master: Any, open_page: Any, code: Path) -> None:
    experiment = master.create(code, name="unlucky")
    page = open_page(master, f"/experiments/{experiment.id}")
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    page.context.set_offline(True)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("alert").first).to_contain_text("The master does not answer")
    page.context.set_offline(False)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Activate")).to_be_visible()
    experiment.kill()
