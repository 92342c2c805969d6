"""Pages of a shared master: usage, quotas, reservations, models."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Client

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

TRAIN = """
import paceline

with paceline.core.init() as context:
    for step in (1, 2):
        context.train.report_validation_metrics(step, {"loss": 1 / step})
    with context.checkpoint.store_path({"steps_completed": 2}) as (path, _):
        (path / "state.txt").write_text("state 2")
"""
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
WIDE = {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def lab(master_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a master that Ann, Bob and the administrator share, with an ended experiment."""
    running = master_of(tmp_path_factory.mktemp("home"), "--slots", 2)
    for name in ("ann", "bob"):
        running.client.add_user(name)
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text(TRAIN)
    config = {
        "name": "trained", "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "loss"},
        "environment": {"working_dir": str(code)},
    }  # fmt: skip
    experiment = running.client.create_experiment(config)
    assert experiment.wait(0.1).value == "COMPLETED"
    running.experiment = experiment
    yield running
    running.stop()


@pytest.fixture
def open_as(lab: Any, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that opens a page of the lab as a user."""

    def open_it(user: str, path: str, **options: Any) -> Any:
        return open_page(lab, path, link=lab.client.sign_in_link(user=user), **options)

    return open_it


@pytest.mark.long
def test_usage_is_shown_by_what_one_asks_for_and_saved_as_csv(lab: Any, open_as: Any) -> None:
    """An administrator answers who used what, in the page and in a file."""
    page = open_as("admin", "/cluster")
    page.get_by_role("link", name="Usage").click()
    row = page.get_by_role("row").filter(has_text="admin")
    expect(row).to_contain_text("100.0 %")
    page.get_by_role("checkbox", name="Project").check()
    expect(page.get_by_role("columnheader", name="Project")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="admin")).to_contain_text("Default")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download CSV").click()
    head, first, *_ = Path(saved.value.path()).read_text().splitlines()
    amounts = "num_trials,gpu_hours,training_hours,lost_hours,known_hours"
    assert head == f"user,project,slot_hours,wait_hours,{amounts}"
    for name in ("GPU hours", "Hours lost", "Goodput"):
        expect(page.get_by_role("columnheader", name=name)).to_be_visible()
    told = lab.client.usage(by=["user", "project"])[0]
    assert first.split(",")[:2] == ["admin", "Default"]
    assert float(first.split(",")[2]) == pytest.approx(told.slot_hours)
    page.get_by_label("From month").fill("2020-01")
    page.get_by_label("To month").fill("2020-02")
    expect(page.get_by_text("Nothing was used")).to_be_visible()
    # The address has it all.
    page.reload()
    expect(page.get_by_label("To month")).to_have_value("2020-02")
    expect(page.get_by_role("checkbox", name="Project")).to_be_checked()


@pytest.mark.long
def test_two_administrators_who_change_one_quota_do_not_overwrite_each_other(
    lab: Any, open_as: Any
) -> None:
    """The second is told, keeps what was typed, and chooses."""
    page = open_as("admin", "/quotas")
    page.get_by_role("button", name="Set a quota").click()
    page.get_by_role("combobox", name="Of").click()
    page.get_by_role("option", name="user bob").click()
    page.get_by_role("textbox", name="Slots at once").fill("3")
    page.get_by_role("textbox", name="GiB of checkpoints").fill("1.5")
    page.get_by_role("button", name="Save").click()
    row = page.get_by_role("row").filter(has_text="user bob")
    expect(row).to_contain_text("0 of 3")
    expect(row).to_contain_text("0 B of 1.5 GiB")

    page.get_by_role("button", name="Edit the quota of user bob").click()
    dialog = page.get_by_role("dialog", name="Quota of user bob")
    dialog.get_by_role("textbox", name="Slots at once").fill("4")
    lab.client.set_quota(user="bob", revision=1, max_slots=7)
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Nothing was overwritten")
    expect(dialog.get_by_role("textbox", name="Slots at once")).to_have_value("4")
    dialog.get_by_role("button", name="Load theirs").click()
    expect(dialog.get_by_role("textbox", name="Slots at once")).to_have_value("7")
    dialog.get_by_role("textbox", name="Slots at once").fill("5")
    dialog.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("0 of 5")
    [quota] = lab.client.quotas()
    assert (quota.max_slots, quota.checkpoint_bytes, quota.revision) == (5, None, 3)

    # Bob sees his own, and changes nothing; Ann sees none.
    of_bob = open_as("bob", "/quotas")
    expect(of_bob.get_by_role("cell", name="user bob")).to_be_visible()
    expect(of_bob.get_by_role("button", name="Set a quota")).to_have_count(0)
    expect(of_bob.get_by_role("button", name="Edit the quota")).to_have_count(0)
    expect(of_bob.get_by_role("link", name="Users", exact=True)).to_have_count(0)
    expect(open_as("ann", "/quotas").get_by_text("No quotas")).to_be_visible()
    page.get_by_role("button", name="Delete the quota of user bob").click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_text("No quotas")).to_be_visible()


@pytest.mark.long
def test_a_session_that_ends_while_a_dialog_is_open_loses_nothing(lab: Any, open_as: Any) -> None:
    """The sign-in comes over the dialog, which goes on with what was typed."""
    lab.client.set_password("correct horse")
    page = open_as("admin", "/quotas")
    page.get_by_role("button", name="Set a quota").click()
    dialog = page.get_by_role("dialog", name="Set a quota")
    dialog.get_by_role("combobox", name="Of").click()
    page.get_by_role("option", name="user ann").click()
    dialog.get_by_role("textbox", name="Slots at once").fill("6")
    # Setting a password ends all sign-ins.
    lab.client.set_password("correct horse")
    again = page.get_by_role("dialog", name="Sign in again")
    again.get_by_label("Password", exact=True).fill("correct horse")
    again.get_by_role("button", name="Sign in").click()
    expect(again).to_be_hidden()
    expect(dialog.get_by_role("textbox", name="Slots at once")).to_have_value("6")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("cell", name="user ann", exact=True)).to_be_visible()
    lab.client.delete_quota(user="ann", revision=1)


@pytest.mark.long
def test_a_node_is_reserved_and_released_by_keyboard_alone(lab: Any, open_as: Any) -> None:
    """Others see the reservation; administrators make and end it."""
    page = open_as("admin", "/cluster")
    page.get_by_role("button", name="Reserve a node").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Reserve a node")
    expect(dialog.get_by_role("combobox", name="Node")).to_have_value("local")
    dialog.get_by_role("combobox", name="Node").focus()
    page.keyboard.press("Tab")
    expect(dialog.get_by_role("combobox", name="For")).to_be_focused()
    page.keyboard.type("bob")
    # Who may be chosen is asked for when the dialog opens.
    expect(page.get_by_role("option", name="bob")).to_be_visible()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("combobox", name="For")).to_have_value("bob")
    dialog.get_by_label("Until").fill("2020-01-01T00:00")
    dialog.get_by_role("button", name="Reserve", exact=True).focus()
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("must end after it begins")
    dialog.get_by_label("From").fill("2090-01-01T00:00")
    dialog.get_by_label("Until").fill("2090-01-02T00:00")
    dialog.get_by_role("button", name="Reserve", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    of_ann = open_as("ann", "/cluster")
    region = of_ann.get_by_role("region", name="Reservations")
    expect(region.get_by_role("row").nth(1)).to_contain_text("bob")
    expect(of_ann.get_by_role("button", name="Release")).to_have_count(0)
    expect(of_ann.get_by_role("button", name="Reserve a node")).to_have_count(0)
    page.get_by_role("button", name="Release local of bob").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Release it").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("No node is reserved.")).to_be_visible()


@pytest.mark.long
def test_a_checkpoint_gets_a_name_an_alias_and_notes_and_is_downloaded(
    lab: Any, open_as: Any
) -> None:
    """From the checkpoint to the registry, and what the command line says of it."""
    page = open_as("admin", f"/experiments/{lab.experiment.id}/checkpoints")
    page.get_by_role("button", name="1 file").click()
    page.get_by_role("button", name="Register as a model").click()
    dialog = page.get_by_role("dialog", name="Register as a model")
    dialog.get_by_role("textbox", name="Name of the model").fill("net's best")
    dialog.get_by_role("button", name="Register").click()
    expect(page.get_by_text("It is version 1 of net's best.")).to_be_visible()
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Models").click()
    page.get_by_role("link", name="net's best").click()
    trial = lab.experiment.trials()[0].id
    expect(page.get_by_role("link", name=f"trial {trial}")).to_be_visible()
    page.get_by_role("button", name="Set alias: version 1").click()
    page.get_by_role("textbox", name="Alias").fill("production")
    page.get_by_role("button", name="Set", exact=True).click()
    expect(page.get_by_role("cell", name="production")).to_be_visible()
    page.get_by_role("button", name="Notes: version 1").click()
    page.get_by_role("textbox", name="Notes").fill("<b>good</b>")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("cell", name="<b>good</b>")).to_be_visible()
    page.get_by_role("button", name="Files: version 1").click()
    with page.expect_download() as saved:
        page.get_by_role("link", name="state.txt").click()
    assert Path(saved.value.path()).read_text() == "state 2"
    page.keyboard.press("Escape")
    found = lab.client.get_model("net's best")
    assert (found.aliases, found.versions[0].notes) == ({"production": 1}, "<b>good</b>")
    page.get_by_role("button", name="Remove the alias production").click()
    expect(page.get_by_role("cell", name="production")).to_have_count(0)
    page.get_by_role("button", name="Delete", exact=True).first.click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_text("No models yet")).to_be_visible()


@pytest.fixture
def filled(lab: Any) -> Iterator[None]:
    """Give the lab a model, a quota and a reservation."""
    [checkpoint] = lab.experiment.checkpoints()
    lab.client.register_model("axe", checkpoint.uuid, alias="champion", notes="a note")
    lab.client.set_quota(user="ann", max_slots=3, slot_hours=10, checkpoint_bytes=2**30)
    lab.client.set_config_rule("template", "default", {"max_restarts": 1})
    lab.client.set_config_rule("template", "gpu", {"max_restarts": 2})
    limits = {"resources.max_slots": {"max": 8}}
    lab.client.set_config_rule("policy", "cost", {"limits": limits}, project="Default")
    begins = time.time() + 86_400
    reserved = lab.client.reserve_node("local", user="ann", begins_at=begins, ends_at=begins + 60)
    yield
    lab.client.end_reservation("local", reserved.id)
    for kind, name, project in (
        ("template", "default", None), ("template", "gpu", None), ("policy", "cost", "Default"),
    ):  # fmt: skip
        lab.client.delete_config_rule(kind, name, project=project, revision=1)
    lab.client.delete_quota(user="ann", revision=1)
    lab.client.delete_model("axe")


@pytest.mark.long
@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_axe_finds_nothing_on_the_pages_of_a_lab(
    lab: Any, filled: None, open_as: Any, go_on: Any, find_problems: Any, theme: str
) -> None:
    """At 390, 1,280 and 1,440 pixels, and at 200 % of the zoom, with the dialogs."""
    pages = {
        "/usage": (), "/usage?by=[%22month%22,%22user%22,%22project%22,%22pool%22]": (),
        "/quotas": ("Set a quota", "Edit the quota of user ann", "Delete the quota of user ann"),
        "/users": (), "/models": (),
        "/rules": (
            "New template", "New policy", "Edit the policy cost of Default",
            "Delete the template default of all projects",
        ),
        "/new": (),
        "/models/axe": (
            "Set alias: version 1", "Files: version 1", "Notes: version 1", "Delete: version 1",
        ),
        "/cluster": ("Reserve a node", "Release local of ann"),
    }  # fmt: skip
    titles = {"/new": "New experiment", "/models/axe": "axe", "/rules": "Templates and policies"}
    page = open_as("admin", "/", color_scheme=theme)
    problems = {}
    # 640 by 400 is what is left of 1,280 by 800 at 200 %.
    for size in (DESKTOP, PHONE, WIDE, {"width": 640, "height": 400}):
        page.set_viewport_size(size)
        for path, dialogs in pages.items():
            go_on(page, path)
            # What was shown stays until the code of the page is there.
            title = titles.get(path, path.partition("?")[0].rpartition("/")[2].capitalize())
            expect(page).to_have_title(f"{title} · Paceline")
            expect(page.get_by_text("Loading")).to_have_count(0)
            if found := find_problems(page, "best-practice"):
                problems[f"{path} at {size['width']}"] = found
            is_within = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert is_within, f"{path} is wider than {size['width']}"
            for name in dialogs:
                page.get_by_role("button", name=name, exact=True).click()
                dialog = page.get_by_role("dialog")
                dialog.wait_for()
                if found := find_problems(page):
                    problems[f"{name} at {size['width']}"] = found
                box = dialog.bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= size["width"], f"{name} is too wide"
                page.keyboard.press("Escape")
                expect(dialog, f"{name} is closed").to_have_count(0)
    assert problems == {}, json.dumps(problems, indent=2)


def test_many_are_moved_into_a_project_of_a_shared_master(lab: Any, open_as: Any) -> None:
    """The dialog offers projects in which the user may create."""
    lab.client.create_project("vision")
    page = open_as("admin", "/experiments")
    page.get_by_role("checkbox", name="Select trained").click()
    page.get_by_role("button", name="With 1 selected experiment").click()
    page.get_by_role("menuitem", name="Move 1").click()
    dialog = page.get_by_role("dialog", name="Move 1 experiment?")
    dialog.get_by_role("combobox", name="Project").click()
    page.get_by_role("option", name="vision").click()
    dialog.get_by_role("button", name="Move them").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert lab.experiment.reload().data.project == "vision"


@pytest.mark.long
def test_a_policy_is_set_in_the_page_and_told_where_an_experiment_is_made(
    lab: Any, open_as: Any
) -> None:
    """Set, seen by others, changed by two, told at the config, and deleted."""
    page = open_as("admin", "/rules")
    expect(page.get_by_text("No templates or policies")).to_be_visible()
    page.get_by_role("button", name="New policy").click()
    dialog = page.get_by_role("dialog", name="New policy")
    dialog.get_by_role("textbox", name="Name").fill("cost")
    editor = dialog.get_by_role("textbox", name="The policy in YAML")
    editor.fill("required: [label]")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must name fields of experiment configs")
    editor.fill("required: [labels]")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("row").filter(has_text="cost")).to_contain_text("required")
    page.get_by_role("button", name="New template").click()
    dialog = page.get_by_role("dialog", name="New template")
    dialog.get_by_role("textbox", name="The template in YAML").fill("max_restarts: 3")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)

    of_ann = open_as("ann", "/rules")
    expect(of_ann.get_by_role("button", name="New policy")).to_have_count(0)
    of_ann.get_by_role("button", name="Show the policy cost of all projects").click()
    expect(of_ann.get_by_role("dialog")).to_contain_text("labels")
    of_ann.goto("/new")
    expect(of_ann.get_by_text("must be given by the policy 'cost' of all projects")).to_be_visible()
    editor = of_ann.get_by_role("textbox", name="Config in YAML")
    editor.fill(
        "entrypoint: python3 t.py\nlabels: [a]\nsearcher: {name: single, metric: loss}\n"
        "environment: {working_dir: /tmp}\n"
    )
    told = of_ann.get_by_text("max_restarts comes from the template 'default' of all projects")
    expect(told).to_be_visible()

    page.get_by_role("button", name="Edit the policy cost of all projects").click()
    dialog = page.get_by_role("dialog")
    lab.client.set_config_rule("policy", "cost", {"required": ["name"]}, revision=1)
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must begin from its newest revision")
    dialog.get_by_role("button", name="Keep as it is").click()
    for name in ("policy cost", "template default"):
        page.get_by_role("button", name=f"Delete the {name} of all projects").click()
        page.get_by_role("button", name="Delete it").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_text("No templates or policies")).to_be_visible()


def test_the_cluster_shows_storages_and_whose_bytes_they_have(
    lab: Any, open_as: Any, wait_until: Callable[..., None]
) -> None:
    """The master's own storage, where the experiment has its checkpoint."""
    # The first check comes some seconds after the start of the master.
    wait_until(lambda: lab.client.storages()[0].checked_at is not None)
    page = open_as("admin", "/cluster")
    region = page.get_by_role("region", name="Storages")
    row = region.get_by_role("row").nth(1)
    expect(row).to_contain_text("checkpoints")
    expect(row).to_contain_text("answers", timeout=30_000)
    expect(row).to_contain_text("ms")
    page.get_by_role("combobox", name="Divide the bytes by").click()
    page.get_by_role("option", name="Users").click()
    expect(row).to_contain_text("admin")


def test_the_cluster_shows_the_rules_of_pools_and_counts_only_nodes_with_slots(
    lab: Any, open_as: Any
) -> None:
    """Who may use a pool, in words."""
    lab.client.set_pool("own", own_runners=True, open_to=["ann"], best_priority=30)
    page = open_as("ann", "/cluster")
    row = page.get_by_role("region", name="Pools").get_by_role("row").filter(has_text="own")
    expect(row).to_contain_text("open to ann; best priority 30; own runners only")
    expect(row.get_by_role("cell").nth(2)).to_have_text("0")
    lab.client.reset_pool("own")


def test_the_page_of_users_offers_others_than_administrators_no_change(
    lab: Any, open_as: Any
) -> None:
    """By its address, as no link leads there."""
    page = open_as("ann", "/users")
    expect(page.get_by_role("cell", name="ann", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Add user")).to_have_count(0)
    expect(page.get_by_role("button", name="Remove")).to_have_count(0)
    expect(page.get_by_role("switch").first).to_be_disabled()
    page = open_as("admin", "/users")
    expect(page.get_by_role("button", name="Add user")).to_be_visible()


@pytest.mark.long
def test_ones_own_experiments_are_shown_first(lab: Any, open_as: Any) -> None:
    """The list begins with those of whoever looks; a switch shows all, and the address has it."""
    token = lab.client.create_token("lists-of-ann", "admin", user="ann").secret
    with Client(lab.url, token) as ann:
        config = {"name": "of ann", "entrypoint": "x", "checkpoint_storage": "/tmp/none"}
        searcher = {"name": "single", "metric": "loss"}
        made = ann.create_experiment(config | {"searcher": searcher}, activate=False)
    page = open_as("admin", "/experiments")
    expect(page.get_by_role("link", name="trained")).to_be_visible()
    expect(page.get_by_role("link", name="of ann")).to_have_count(0)
    page.get_by_role("switch", name="Mine").uncheck()
    expect(page.get_by_role("link", name="of ann")).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="of ann")).to_be_visible()
    page = open_as("ann", "/experiments")
    expect(page.get_by_role("link", name="of ann")).to_be_visible()
    expect(page.get_by_role("link", name="trained")).to_have_count(0)
    lab.paceline("e", "kill", made.id)


def test_a_token_of_a_user_cannot_do_what_the_pages_do_not_offer(lab: Any) -> None:
    """Routes behind the buttons, asked without them."""
    token = lab.client.create_token("of-bob", "admin", user="bob").secret
    with Client(lab.url, token) as bob:
        for ask in (
            lambda: bob.set_quota(user="bob", max_slots=99),
            lambda: bob.reserve_node("local", user="bob", begins_at=1, ends_at=2**33),
        ):
            with pytest.raises(Exception, match="admin"):
                ask()
