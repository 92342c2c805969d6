"""`paceline login` and `paceline user`: ways into the web UI."""

from typing import Annotated

import typer

app = typer.Typer(help="Manage the password of the web UI.", no_args_is_help=True)


def login() -> None:
    """Print a sign-in link for the web UI. It works once."""
    from paceline.cli._connection import connect
    from paceline.cli._master_process import NO_WEB_UI, sign_in_link
    from paceline.client import home_directory, read_master_file

    with connect() as client:
        if not client.master().has_web_ui:
            typer.echo(NO_WEB_UI, err=True)
        typer.echo(sign_in_link(client, read_master_file(home_directory())))


@app.command("set-password")
def set_password(
    password: Annotated[
        str,
        typer.Option(
            prompt=True,
            hide_input=True,
            confirmation_prompt=True,
            metavar="TEXT",
            help="Password, at least 8 characters. By default the command asks for it.",
        ),
    ],
    user: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the user. The only user is `admin`.")
    ] = "admin",
) -> None:
    """Set the password for the web UI. This ends all sign-ins of the user."""
    from paceline.cli._connection import connect
    from paceline.cli._errors import CommandError

    try:
        with connect() as client:
            client.set_password(password, user=user)
    except ValueError as error:
        raise CommandError(str(error)) from error
    typer.echo(f"The password of {user} is set.")
