"""Commands `paceline login`, `user` and `token`."""

import re
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli._command_classes import CommandGroup
from paceline.cli._completions import complete_token
from paceline.cli._console_output import format_moment, print_answer, print_list
from paceline.cli._options_and_errors import CommandError, connect, is_agent

if TYPE_CHECKING:
    from paceline._cluster.messages.master_models import Token


token_app = CommandGroup(help="Manage tokens for programs and people.")

_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_NEVER = "never"
_USE = "Programs take it from $PACELINE_TOKEN."
_USES = {
    "runner": "Put it into a file that only its owner may read, for `paceline runner --token-file`."
}


@token_app.command("create")
def create(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the token, to tell it from others.")
    ],
    scope: Annotated[
        Literal["read", "submit", "admin", "runner", "report"],
        typer.Option(
            help="Permissions of the token. `read`: read everything. `submit`: also submit and"
            " change experiments. `admin`: everything. `runner`: only run the attempts of one node."
            " `report`: only report runs without a master.",
        ),
    ] = "read",
    expires: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="When it expires, such as 30m, 12h or 90d from now, or never."
        ),
    ] = "90d",
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="Of the scope `runner`: the only node that it registers. Default: any.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="POOL",
            help="Of the scope `runner`: the only pool that its nodes may be in. Default: any.",
        ),
    ] = None,
) -> None:
    """Make a token and print its secret. The secret is not shown again."""

    expires_in_s = _seconds(expires)
    try:
        with connect() as client:
            token = client.create_token(
                name, scope, expires_in_s=expires_in_s, node=node, pool=pool
            )
    except ValueError as error:
        raise CommandError(str(error)) from error
    print_answer(token, token.secret)
    moment = format_moment(token.expires_at)
    expiry = "never expires" if moment is None else f"expires at {moment}"
    only = f", is for {found}" if (found := _binding(token)) else ""
    typer.echo(
        f"The token {token.name} has the scope {token.scope.value}{only} and {expiry}. It is not"
        f" shown again. {_USES.get(scope, _USE)}",
        err=True,
    )


@token_app.command("list", is_list=True)
def list_tokens() -> None:
    """List the tokens without their secrets."""

    with connect() as client:
        tokens = client.list_tokens()
    now = time.time()
    print_list(
        tokens,
        ["ID", "Name", "Scope", "For", "State", "Created", "Expires"],
        [
            (
                token.id,
                token.name,
                token.scope.value,
                _binding(token),
                _token_state(token.revoked_at, token.expires_at, now),
                format_moment(token.created_at),
                format_moment(token.expires_at) or _NEVER,
            )
            for token in tokens
        ],
        right=["ID"],
        empty="There are no tokens besides that of the home. `paceline token create` makes one.",
    )


@token_app.command("revoke")
def revoke(
    token: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name or id of the token.", autocompletion=complete_token
        ),
    ],
) -> None:
    """Revoke a token for good. Requests with the token are refused."""

    try:
        with connect() as client:
            revoked = client.revoke_token(int(token) if token.isdecimal() else token)
    except LookupError as error:
        raise CommandError(str(error)) from error
    print_answer(revoked, f"The token {revoked.name} (id {revoked.id}) is revoked.")


@token_app.command("renew-home")
def renew_home() -> None:
    """Replace the token in the master's home. Requests with the old token are refused."""

    with connect() as client:
        home = client.master().home
        client.renew_home_token()
    print_answer({"home": home}, f"The home {home} has another token now, in its file `token`.")


def _seconds(text: str) -> float | None:

    if text == _NEVER:
        return None
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise CommandError(
            f"`--expires` must be a time such as 30m, 12h or 90d, or never, but got {text!r}."
        )
    return int(match[1]) * _UNITS_S[match[2]]


def _binding(token: "Token") -> str:
    """Return the only node and pool a token is valid for; empty if valid for any."""
    pairs = (("node", token.node), ("pool", token.pool))
    return ", ".join(f"{kind} {value}" for kind, value in pairs if value is not None)


def _token_state(revoked_at: float | None, expires_at: float | None, now: float) -> str:
    if revoked_at is not None:
        return "revoked"
    return "expired" if expires_at is not None and expires_at <= now else "valid"


user_app = CommandGroup(help="Manage the password of the web UI.")


def login() -> None:
    """Print a sign-in link for the web UI. The link works once."""
    from paceline.cli._master_process import NO_WEB_UI, sign_in_link
    from paceline.client._http_session import home_directory, read_master_file

    with connect() as client:
        has_web_ui = client.master().has_web_ui
        if not has_web_ui:
            typer.echo(NO_WEB_UI, err=True)
        link = sign_in_link(client, read_master_file(home_directory()))
    print_answer({"sign_in_url": link, "has_web_ui": has_web_ui}, link)


@user_app.command("set-password")
def set_password(
    password: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Password, at least 8 characters. By default the command asks for it.",
        ),
    ] = None,
    user: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the user. The only user is `admin`.")
    ] = "admin",
) -> None:
    """Set the password for the web UI. This ends all sign-ins of the user."""

    if password is None:
        if is_agent() or not sys.stdin.isatty():
            raise CommandError("`--password` must be given without a terminal to ask for it.")
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    try:
        with connect() as client:
            client.set_password(password, user=user)
    except ValueError as error:
        raise CommandError(str(error)) from error
    print_answer({"user": user}, f"The password of {user} is set.")
