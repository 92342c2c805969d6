"""Commands `paceline model`: names for models, with versions, aliases and notes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._completions import complete_checkpoint
from paceline.cli._connection import checkpoint_by_prefix, connect
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import RegisteredModel

model_app = CommandGroup(help="Show registered models: versions, aliases, files.")

_Name = Annotated[str, typer.Argument(help="Name of the model.", metavar="NAME")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@model_app.command("list", is_list=True)
def list_models() -> None:
    """List registered models, also those of MLflow's clients."""
    with connect() as client:
        found = client.list_models()
    console.print_list(
        found,
        ["Name", "Newest", "Aliases", "Changed"],
        [
            (one.name, one.newest_version, _aliases_text(one), console.Age(one.changed_at))
            for one in found
        ],
        right=["Newest"],
        shortened=["Aliases"],
        empty="No models. `paceline model register NAME UUID` makes one of a checkpoint.",
    )


def _aliases_text(model: "RegisteredModel") -> str:
    return ", ".join(f"{alias} = {version}" for alias, version in sorted(model.aliases.items()))


@model_app.command()
def describe(name: _Name, json: options.Json = False) -> None:
    """Show a model with its versions and where each came from."""
    with connect() as client:
        found = client.get_model(name)
    if json:
        console.print_json(found)
        return
    facts = [("Name", found.name), ("Aliases", _aliases_text(found)), ("Notes", found.notes)]
    console.print_facts([(title, text or "-") for title, text in facts])
    console.stdout().print()
    console.print_table(
        ["Version", "Aliases", "Source", "Owner", "Created", "Notes"],
        [
            (
                one.version,
                ", ".join(one.aliases),
                one.source,
                one.owner,
                console.Age(one.created_at),
                one.notes,
            )
            for one in found.versions
        ],
        right=["Version"],
    )


@model_app.command()
def register(
    name: _Name,
    uuid: Annotated[
        str,
        typer.Argument(
            help="UUID of a checkpoint or its beginning.",
            metavar="UUID",
            autocompletion=complete_checkpoint,
        ),
    ],
    alias: Annotated[
        str | None, typer.Option("--alias", metavar="ALIAS", help="Alias to set to the version.")
    ] = None,
    notes: Annotated[
        str, typer.Option("--notes", metavar="TEXT", help="Notes about the version.")
    ] = "",
) -> None:
    """Make a checkpoint the next version of a model, kept from deletion."""
    with connect() as client:
        checkpoint = checkpoint_by_prefix(client, uuid)
        made = client.register_model(name, checkpoint.uuid, alias=alias, notes=notes)
    console.print_answer(made, f"Checkpoint {checkpoint.uuid} is version {made.version} of {name}.")


@model_app.command("alias")
def set_alias(
    name: _Name,
    alias: Annotated[str, typer.Argument(help="Alias, such as champion.", metavar="ALIAS")],
    version: Annotated[
        int | None, typer.Argument(min=1, help="Version that it means from now on.", metavar="N")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the alias away.")] = False,
) -> None:
    """Let an alias mean a version of a model, to promote the version."""
    if (version is None) != remove:
        raise CommandError("Either `N` or `--remove` must be given.")
    with connect() as client:
        client.set_model_alias(name, alias, version)
        found = client.get_model(name)
    told = f"means version {version} of {name}" if version else f"is no alias of {name}"
    console.print_answer(found, f"{alias} {told}.")


@model_app.command()
def download(
    name: _Name,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="New directory. The default is ./models/NAME.", metavar="DIR"
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option("--version", min=1, metavar="N", help="The default is the newest.")
    ] = None,
    alias: Annotated[
        str | None, typer.Option("--alias", metavar="ALIAS", help="Version of this alias instead.")
    ] = None,
) -> None:
    """Copy the files of a model's version into a new directory, by the model's name."""
    if version is not None and alias is not None:
        raise CommandError("Either `--version` or `--alias` must be given, but got both.")
    # A name of a model can have any characters but `/`.
    target = Path("models", name if name not in (".", "..") else "model")
    with connect() as client:
        path = client.download_model(name, output or target, version=version, alias=alias)
    console.print_answer({"path": str(path)}, str(path))


@model_app.command()
def delete(
    name: _Name,
    version: Annotated[
        int | None, typer.Option("--version", min=1, metavar="N", help="Delete only this version.")
    ] = None,
    yes: _Yes = False,
) -> None:
    """Delete a model's name and versions, or a single version. Files stay."""
    what = name if version is None else f"version {version} of {name}"
    with connect() as client:
        options.confirm(f"Delete {what}?", is_confirmed=yes)
        client.delete_model(name, version=version)
    console.print_answer({"name": name, "version": version}, f"Deleted {what}.")
