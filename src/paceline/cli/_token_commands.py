"""`paceline token`: tokens for programs."""

import re
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli._command_options import Json

if TYPE_CHECKING:
    from paceline.messages.tokens import Token

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Manage tokens for programs and people."
)

_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_NEVER = "never"
_USE = "Programs take it from $PACELINE_TOKEN."
_USES = {
    "runner": "Put it into a file that only its owner may read, for `paceline runner --token-file`."
}


@app.command("create")
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
    json: Json = False,
) -> None:
    """Make a token and print its secret. The secret is not shown again."""
    from paceline.cli._connection import connect
    from paceline.cli._console_output import format_moment, print_json
    from paceline.cli._errors import CommandError

    expires_in_s = _seconds(expires)
    try:
        with connect() as client:
            token = client.create_token(
                name, scope, expires_in_s=expires_in_s, node=node, pool=pool
            )
    except ValueError as error:
        raise CommandError(str(error)) from error
    if json:
        print_json(token)
        return
    typer.echo(token.secret)
    moment = format_moment(token.expires_at)
    expiry = "never expires" if moment is None else f"expires at {moment}"
    only = f", is for {found}" if (found := _binding(token)) else ""
    typer.echo(
        f"The token {token.name} has the scope {token.scope.value}{only} and {expiry}. It is not"
        f" shown again. {_USES.get(scope, _USE)}",
        err=True,
    )


@app.command("list")
def list_tokens(json: Json = False) -> None:
    """List the tokens without their secrets."""
    from paceline.cli._connection import connect
    from paceline.cli._console_output import format_moment, print_json, print_table

    with connect() as client:
        tokens = client.list_tokens()
    if json:
        print_json(tokens)
        return
    now = time.time()
    print_table(
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


@app.command("revoke")
def revoke(
    token: Annotated[str, typer.Argument(metavar="NAME", help="Name or id of the token.")],
) -> None:
    """Revoke a token for good. Requests with it are refused."""
    from paceline.cli._connection import connect
    from paceline.cli._errors import CommandError

    try:
        with connect() as client:
            revoked = client.revoke_token(int(token) if token.isdecimal() else token)
    except LookupError as error:
        raise CommandError(str(error)) from error
    typer.echo(f"The token {revoked.name} (id {revoked.id}) is revoked.")


@app.command("renew-home")
def renew_home() -> None:
    """Replace the token in the master's home. Requests with the old token are refused."""
    from paceline.cli._connection import connect

    with connect() as client:
        home = client.master().home
        client.renew_home_token()
    typer.echo(f"The home {home} has another token now, in its file `token`.")


def _seconds(text: str) -> float | None:
    from paceline.cli._errors import CommandError

    if text == _NEVER:
        return None
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise CommandError(
            f"`--expires` must be a time such as 30m, 12h or 90d, or never, but got {text!r}."
        )
    return int(match[1]) * _UNITS_S[match[2]]


def _binding(token: "Token") -> str:
    """Return the only node and pool that a token is for; empty if it is for any."""
    pairs = (("node", token.node), ("pool", token.pool))
    return ", ".join(f"{kind} {value}" for kind, value in pairs if value is not None)


def _token_state(revoked_at: float | None, expires_at: float | None, now: float) -> str:
    if revoked_at is not None:
        return "revoked"
    return "expired" if expires_at is not None and expires_at <= now else "valid"
