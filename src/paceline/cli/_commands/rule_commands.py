"""Commands `paceline template`, `policy` and `storage`, and configs under these rules."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli import _console_output as console
from paceline.cli._command_groups import CommandGroup
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline._cluster.messages.master_models import ConfigRule, Storage
    from paceline.client._client import Client
    from paceline.config._experiment_config import ExperimentConfig

template_app = CommandGroup(help="Manage templates: fields that configs of experiments leave open.")
policy_app = CommandGroup(help="Manage policies: conditions that configs of experiments must meet.")

Kind = Literal["template", "policy"]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file.")]
OfProject = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="Project. Default: all projects.")
]
Revision = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Only if this is still its revision. Default: the newest revision."
    ),
]


@template_app.command("set")
def set_template(
    name: Name, file: File, project: OfProject = None, revision: Revision = None
) -> None:
    """Set a template. All experiments of the project start from the one named default."""
    _set_rule("template", name, file, project, revision)


@policy_app.command("set")
def set_policy(
    name: Name, file: File, project: OfProject = None, revision: Revision = None
) -> None:
    """Set a policy. Experiments that run go on; each change of them must meet the policy."""
    _set_rule("policy", name, file, project, revision)


@template_app.command("list", is_list=True)
def list_templates(project: OfProject = None) -> None:
    """List the templates of a project, or of all projects that you see."""
    _list_rules("template", project)


@policy_app.command("list", is_list=True)
def list_policies(project: OfProject = None) -> None:
    """List the policies of a project, or of all projects that you see."""
    _list_rules("policy", project)


@template_app.command("show")
def show_template(name: Name, project: OfProject = None) -> None:
    """Show the fields of a template."""
    _show_rule("template", name, project)


@policy_app.command("show")
def show_policy(name: Name, project: OfProject = None) -> None:
    """Show the conditions of a policy."""
    _show_rule("policy", name, project)


@template_app.command("delete")
def delete_template(name: Name, project: OfProject = None, revision: Revision = None) -> None:
    """Delete a template. Experiments keep what they have from it."""
    _delete_rule("template", name, project, revision)


@policy_app.command("delete")
def delete_policy(name: Name, project: OfProject = None, revision: Revision = None) -> None:
    """Delete a policy."""
    _delete_rule("policy", name, project, revision)


def _set_rule(kind: Kind, name: str, file: Path, project: str | None, revision: int | None) -> None:
    from paceline.config._read_yaml import read_yaml_file

    content = read_yaml_file(file)
    with connect() as client:
        before = _find_rule(client, kind, name, project)
        newest = 0 if before is None else before.revision
        client.set_config_rule(
            kind, name, content, project=project,
            revision=newest if revision is None else revision,
        )  # fmt: skip
        after = _find_rule(client, kind, name, project)
    console.print_answer(after, f"The {kind} {name} of {project or 'all projects'} is set.")


def _list_rules(kind: Kind, project: str | None) -> None:
    with connect() as client:
        found = [
            one
            for one in client.config_rules()
            if one.kind == kind and (project is None or one.project == project)
        ]
    console.print_list(
        found,
        ["Name", "Project", "Fields", "Changed by", "Changed", "Revision"],
        [
            (
                one.name,
                one.project or "(all)",
                ", ".join(one.content),
                one.changed_by,
                console.format_moment(one.changed_at),
                one.revision,
            )
            for one in found
        ],
        right=["Revision"],
        empty=f"There are none. `paceline {kind} set NAME FILE` makes one.",
    )


def _show_rule(kind: Kind, name: str, project: str | None) -> None:
    import yaml

    with connect() as client:
        found = _rule(client, kind, name, project)
    text = yaml.safe_dump(found.content, sort_keys=False, allow_unicode=True)
    console.print_answer(found, text.rstrip())


def _delete_rule(kind: Kind, name: str, project: str | None, revision: int | None) -> None:
    with connect() as client:
        found = _rule(client, kind, name, project)
        newest = found.revision if revision is None else revision
        client.delete_config_rule(kind, name, project=project, revision=newest)
    text = f"The {kind} {name} of {project or 'all projects'} is deleted."
    console.print_answer({"kind": kind, "name": name, "project": project}, text)


def _find_rule(client: "Client", kind: Kind, name: str, project: str | None) -> "ConfigRule | None":
    wanted = (kind, name, project)
    found = (one for one in client.config_rules() if (one.kind, one.name, one.project) == wanted)
    return next(found, None)


def _rule(client: "Client", kind: Kind, name: str, project: str | None) -> "ConfigRule":
    found = _find_rule(client, kind, name, project)
    if found is None:
        raise CommandError(
            f"There is no {kind} {name!r} of {project or 'all projects'}. Hint: `paceline {kind}"
            " list` shows those that are."
        )
    return found


def check_early(config: Path, overrides: Sequence[str]) -> None:
    """Refuse a wrong config before a master is asked, which may have what is missing in it."""
    from paceline.config._fields_and_problems import MISSING, ConfigError
    from paceline.config._validate_config import load_config

    try:
        load_config(config, overrides)
    except ConfigError as error:
        if any(problem.value is not MISSING for problem in error.problems):
            raise


def code_directory(
    checked: "ExperimentConfig", config: Path, directory: Path | None
) -> Path | None:
    """Return the directory of the code: that of the config if nothing names another place."""
    if directory is None and checked.environment.working_dir is None:
        return config.parent
    return directory


def resolve_dry_run(
    config: Path, overrides: Sequence[str], project: str | None, template: str | None
) -> "tuple[ExperimentConfig, dict[str, str]]":
    """Return a config as the master would have it, and what it fills in; alone without a master."""
    from paceline.client._http_session import MasterUnreachableError
    from paceline.config._validate_config import load_config

    try:
        with connect() as client:
            of = {"project": project, "template": template}
            checked = client.resolve_config(config, overrides, **of)
            return checked, client.filled_fields(config, overrides, **of)
    except MasterUnreachableError:
        if project is not None or template is not None:
            raise
        console.print_note("No master was asked: its templates and policies are not in this.")
    return load_config(config, overrides), {}


storage_app = CommandGroup(help="Show the storages of checkpoints.")


@storage_app.command("list", is_list=True)
def list_storages(
    by: Annotated[
        Literal["project", "user", "experiment"] | None,
        typer.Option(help="Also the bytes of each of these."),
    ] = None,
) -> None:
    """List the storages in use: whether they answer, failed writes, free space and bytes."""
    with connect() as client:
        found = client.storages()
    rows: list[tuple[object, ...]] = []
    for one in found:
        latency = None if one.latency_s is None else f"{1000 * one.latency_s:.1f} ms"
        free = None if one.free_bytes is None else console.format_bytes(one.free_bytes)
        facts = (_state(one), latency, one.num_failed_writes, free)
        rows.append((one.storage, *facts, None, console.format_bytes(one.num_bytes)))
        for use in [] if by is None else getattr(one, f"by_{by}"):
            name = use.name if use.experiment_id is None else f"{use.experiment_id} {use.name}"
            rows.append((one.storage, *[None] * 4, name, console.format_bytes(use.num_bytes)))
    console.print_list(
        found,
        ["Storage", "State", "Latency", "Failed writes", "Free", "Of", "Checkpoints"],
        rows,
        right=["Latency", "Failed writes", "Free", "Checkpoints"],
        empty="No experiment that you see has checkpoints, or may get some.",
    )


def _state(one: "Storage") -> str:
    if one.failing_since is not None:
        return f"fails since {console.format_moment(one.failing_since)}: {one.reason}"
    if one.is_reachable is None:
        return "not checked yet" if one.checked_at is None else "not made yet"
    return "answers"
