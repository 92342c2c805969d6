"""Search for people: queries with completion, search over everything, lineage, history of notes."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect


@pytest.fixture(scope="module")
def stored(master: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return paused experiments: `near`, a baseline with a low rate, `far`, and a fork of it."""
    code = tmp_path_factory.mktemp("code")

    def create(name: str, rate: float, labels: list[str]) -> Any:
        config = {
            "name": name,
            "entrypoint": "python3 train.py",
            "hyperparameters": {"pace": rate},
            "labels": labels,
            "searcher": {"name": "single", "metric": "test_loss"},
            "environment": {"working_dir": str(code)},
        }
        return master.client.create_experiment(config, activate=False)

    near = create("near the shore", 0.001, ["reference"])
    far = create("far out", 0.5, ["reference"])
    far.edit(notes="first words")
    fork = far.fork({"name": "farther"}, activate=False)
    return near, far, fork


@pytest.mark.long
def test_a_query_is_completed_answered_and_refused_in_a_sentence(
    master: Any, stored: Any, open_page: Any, unfold: Any
) -> None:
    page = open_page(master, "/experiments")
    box = page.get_by_role("combobox", name="Search by name, label or id")
    box.fill("pace < 0.01 and ta")
    page.get_by_role("option", name="tag", exact=True).click()
    expect(box).to_have_value("pace < 0.01 and tag")
    box.press_sequentially(":refer")
    page.get_by_role("option", name="reference", exact=True).click()
    expect(box).to_have_value("pace < 0.01 and tag:reference")
    expect(page.get_by_text("1 experiment", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="near the shore")).to_be_visible()
    expect(page.get_by_role("link", name="far out")).to_have_count(0)
    expect(page).to_have_url(re.compile(r"q=pace"))

    box.fill("colour = 3")
    expect(page.get_by_role("alert")).to_contain_text("A field must be one of created")
    # The browser's button leads to what was asked before.
    box.fill("pace > 0.01 and tag:reference")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("link", name="far out")).to_be_visible()

    # The same text chooses runs to compare.
    page.goto("/compare?runs=pace < 0.01 and tag:reference")
    expect(page.get_by_text("1 of 1 run shown")).to_be_visible()
    unfold(page, "Choose runs")
    page.get_by_role("combobox", name="Search runs").fill("pace < blue")
    expect(page.get_by_role("alert")).to_contain_text("`pace` must be compared to a number")
    page.get_by_role("combobox", name="Search runs").fill("tag:reference")
    expect(page.get_by_text("3 of 3 runs shown")).to_be_visible()


@pytest.mark.long
def test_one_search_finds_all_kinds_by_keyboard_alone(
    master: Any, stored: Any, open_page: Any
) -> None:
    near, far, _ = stored
    far.edit(notes="the needle is here")
    page = open_page(master, "/cluster")
    expect(page.get_by_role("heading", name="Cluster")).to_be_visible()
    page.keyboard.press("Control+k")
    dialog = page.get_by_role("dialog", name="Search")
    box = dialog.get_by_role("combobox", name="Search everything")
    expect(box).to_be_focused()
    box.fill("needle")
    notes = dialog.get_by_role("region", name="Notes")
    expect(notes.get_by_role("link")).to_have_text(f"far out ({far.id})")
    dialog.get_by_role("button", name="Search the logs").click()
    expect(dialog.get_by_text("No line has this text.")).to_be_visible()
    box.fill("refer")
    expect(dialog.get_by_role("region", name="Labels").get_by_role("link")).to_have_text(
        "reference"
    )
    box.fill("pace = 0.001 and tag:reference")
    trials = dialog.get_by_role("region", name="Trials and runs")
    expect(trials.get_by_role("link")).to_have_count(1)
    expect(trials.get_by_role("link")).to_contain_text("of near the shore")
    box.fill("shore")
    # The query before it has found the same experiment, but no setting.
    expect(dialog.get_by_role("region", name="Config fields and values")).to_be_visible()
    experiments = dialog.get_by_role("region", name="Experiments")
    expect(experiments.get_by_role("link")).to_have_text(f"near the shore ({near.id})")
    page.keyboard.press("Escape")
    expect(page.get_by_role("listbox")).to_have_count(0)
    page.keyboard.press("ArrowDown")
    expect(experiments.get_by_role("link")).to_be_focused()
    # Somebody types faster than the answer comes: what was found before is none.
    page.clock.install()
    page.clock.pause_at(time.time() + 3600)
    box.fill("shores")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.tagName") == "INPUT"
    page.clock.resume()
    expect(dialog.get_by_role("status")).to_have_text("Nothing is found")
    box.fill("shore")
    experiments.get_by_role("link").press("Enter")
    expect(page.get_by_role("heading", name="near the shore")).to_be_visible()
    expect(page).to_have_url(re.compile(f"/experiments/{near.id}$"))

    page.keyboard.press("Shift+?")
    sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(sheet.get_by_role("cell", name="New experiment")).to_be_visible()
    page.keyboard.press("Escape")
    expect(sheet).to_have_count(0)
    page.keyboard.press("g")
    page.keyboard.press("e")
    expect(page.get_by_role("heading", name="Experiments")).to_be_visible()


@pytest.mark.long
def test_lineage_is_a_tree_and_earlier_notes_can_be_restored(
    master: Any, stored: Any, open_page: Any
) -> None:
    _, far, fork = stored
    page = open_page(master, f"/experiments/{far.id}/lineage")
    tree = page.get_by_role("region", name="Lineage")
    expect(tree.get_by_text(f"far out ({far.id}), this one")).to_be_visible()
    expect(tree.get_by_text("forked", exact=True)).to_be_visible()
    tree.get_by_role("link", name=f"farther ({fork.id})").click()
    expect(tree.get_by_text(f"farther ({fork.id}), this one")).to_be_visible()

    fork.edit(notes="earlier words")
    fork.edit(notes="later words")
    page.get_by_role("link", name="Notes").click()
    field = page.get_by_role("textbox", name="Notes", exact=True)
    expect(field).to_have_value("later words")
    page.get_by_role("button", name="History: 2 versions").click()
    versions = page.get_by_role("list", name="Versions of the notes").get_by_role("listitem")
    expect(versions.first).to_contain_text("admin")
    page.get_by_role("button", name="Show version 1").click()
    expect(page.get_by_role("textbox", name="Version 1")).to_have_value("earlier words")
    page.get_by_role("button", name="Restore it").click()
    expect(field).to_have_value("earlier words")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("button", name="History: 3 versions")).to_be_visible()
    assert fork.reload().data.notes == "earlier words"


@pytest.mark.long
def test_code_is_uploaded_and_a_fork_changes_one_value_in_a_form(
    master: Any, open_page: Any, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    (code / "deep" / ".git").mkdir(parents=True)
    (code / "deep" / ".git" / "config").write_text("not sent")
    long = f"deep/{'folder-' * 10}/{'long-' * 12}.py"
    (code / long).parent.mkdir()
    (code / long).write_text("x = 1\n" * 200)
    (code / "train.py").write_text("print('uploaded')\n")
    page = open_page(master, "/new")
    # A directory that is not there is told before anything is created.
    warning = page.get_by_text("must be a directory on the machine that trains, but /path/to/code")
    expect(warning).to_be_visible()
    page.get_by_label("Directory of the code").set_input_files(code)
    expect(page.get_by_text("2 files, 1.2 KiB, are sent with it")).to_be_visible()
    expect(warning).to_have_count(0)
    page.get_by_role("switch", name="Do not start yet").click()
    page.get_by_role("button", name="Create, paused").click()
    expect(page.get_by_role("heading", name="my-experiment")).to_be_visible()
    made = int(page.url.rsplit("/", 1)[1])
    client = master.client
    assert client.get_experiment(made).config["environment"]["working_dir"] is None
    copy = tmp_path / "copy"
    client.get_experiment(made).download_code(copy)
    sent = sorted(one.relative_to(copy).as_posix() for one in copy.rglob("*.py"))
    assert sent == [long, "train.py"]
    assert (copy / "train.py").read_text() == "print('uploaded')\n"

    page.goto(f"/new?fork={made}")
    page.get_by_role("combobox", name="Hyperparameter").click()
    page.get_by_role("option", name="learning_rate").click()
    value = page.get_by_role("textbox", name="Value")
    expect(value).to_have_value("0.001")
    value.fill("0.02")
    page.get_by_role("button", name="Change it").click()
    expect(page.get_by_text("learning_rate: 0.02")).to_be_visible()
    page.get_by_role("switch", name="Do not start yet").click()
    page.get_by_role("button", name="Create, paused").click()
    expect(page).to_have_url(re.compile(f"/experiments/(?!{made}$)[0-9]+$"))
    fork = client.get_experiment(int(page.url.rsplit("/", 1)[1]))
    assert fork.config["hyperparameters"] == {"learning_rate": 0.02}
