"""Commands `paceline login`, `user` and `token`."""

import base64
import hashlib
import platform
import re
import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._completions import complete_token
from paceline.cli._connection import chosen_master, connect
from paceline.cli._errors import CommandError

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
            help="Permissions of the token, within those of its user. `read`: read everything."
            " `submit`: also submit and change experiments. `admin`: everything. `runner`: only run"
            " the attempts of one node. `report`: only report runs without a master.",
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
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="User as whom it acts. Default: you.")
    ] = None,
) -> None:
    """Make a token and print its secret. The secret is not shown again."""

    expires_in_s = _seconds(expires)
    try:
        with connect() as client:
            token = client.create_token(
                name, scope, expires_in_s=expires_in_s, node=node, pool=pool, user=user
            )
    except ValueError as error:
        raise CommandError(str(error)) from error
    console.print_answer(token, token.secret)
    moment = console.format_moment(token.expires_at)
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
    console.print_list(
        tokens,
        ["ID", "Name", "User", "Scope", "For", "State", "Created", "Expires"],
        [
            (
                token.id,
                token.name,
                token.user,
                token.scope.value,
                _binding(token),
                _token_state(token.revoked_at, token.expires_at, now),
                console.format_moment(token.created_at),
                console.format_moment(token.expires_at) or _NEVER,
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
    console.print_answer(revoked, f"The token {revoked.name} (id {revoked.id}) is revoked.")


@token_app.command("renew-home")
def renew_home() -> None:
    """Replace the token in the master's home. Requests with the old token are refused."""

    with connect() as client:
        home = client.master().home
        client.renew_home_token()
    console.print_answer(
        {"home": home}, f"The home {home} has another token now, in its file `token`."
    )


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


user_app = CommandGroup(help="Manage users, their passwords and roles.")
project_app = CommandGroup(help="Manage projects and their members.")

UserName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the user.")]
ProjectName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the project.")]


def login(
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Ask for this user's password and print a token."),
    ] = None,
    password: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With `--user`: the password. Default: asks for it."),
    ] = None,
    oidc: Annotated[
        bool,
        typer.Option("--oidc", help="Sign in by OpenID Connect in a browser, and print a token."),
    ] = False,
) -> None:
    """Print a sign-in link for the web UI, which works once, or a token for a user."""
    from paceline.cli._master_process import NO_WEB_UI, sign_in_link
    from paceline.client._http_session import home_directory, read_master_file

    if oidc:
        _print_token_by_code()
        return
    if user is not None:
        _print_token_of(user, password or _ask_password(is_new=False))
        return
    with connect() as client:
        has_web_ui = client.master().has_web_ui
        if not has_web_ui:
            typer.echo(NO_WEB_UI, err=True)
        link = sign_in_link(client, read_master_file(home_directory()))
    console.print_answer({"sign_in_url": link, "has_web_ui": has_web_ui}, link)


def _print_token_of(user: str, password: str) -> None:
    from paceline.client._client import Client

    name = _token_name(user)
    # The password opens the route: a home with a token is on the master's machine only.
    with Client(chosen_master.get(), "none") as client:
        token = client.log_in(user, password, name=name)
    console.print_answer(token, token.secret)
    typer.echo(f"The token {token.name} acts as {user}. {_USE}", err=True)


def _token_name(user: str) -> str:
    words = (user, platform.node()[:20], time.strftime("%Y%m%d-%H%M%S"))
    return re.sub("[^A-Za-z0-9_.-]", "-", ".".join(words))[-64:]


def _print_token_by_code() -> None:
    """Print a link, ask for the code that its page shows, and print a token for it."""
    from paceline.client._client import Client

    if options.is_agent() or not sys.stdin.isatty():
        raise CommandError(
            "`--oidc` must be used at a terminal, to ask for the code that the browser shows."
        )
    # RFC 7636: who sees the link or the code alone gets no token.
    verifier = secrets.token_urlsafe(32)
    digest = hashlib.sha256(verifier.encode()).digest()
    challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    with Client(chosen_master.get(), "none") as client:
        link = f"{client.url}/api/v1/oidc/sign-in?challenge={challenge}"
        typer.echo(f"Sign in, in a browser on any machine: {link}", err=True)
        code = str(typer.prompt("Code that the page shows", err=True)).strip()
        token = client.log_in_by_code(code, verifier, name=_token_name("oidc"))
    console.print_answer(token, token.secret)
    typer.echo(f"The token {token.name} is made. {_USE}", err=True)


def _ask_password(*, is_new: bool) -> str:
    if options.is_agent() or not sys.stdin.isatty():
        raise CommandError("`--password` must be given without a terminal to ask for it.")
    return str(typer.prompt("Password", hide_input=True, confirmation_prompt=is_new, err=True))


@user_app.command("add")
def add_user(
    name: UserName,
    role: Annotated[
        Literal["viewer", "editor", "admin", "none"],
        typer.Option(help="Role in the project Default."),
    ] = "editor",
    admin: Annotated[bool, typer.Option("--admin", help="See and change everything.")] = False,
    service: Annotated[bool, typer.Option("--service", help="A program, not a person.")] = False,
) -> None:
    """Add a user and print a sign-in link for the user. A removed user comes back."""

    try:
        with connect() as client:
            added = client.add_user(
                name, role=None if role == "none" else role, is_admin=admin, is_service=service
            )
            link = client.sign_in_link(user=name)
    except ValueError as error:
        raise CommandError(
            "`NAME` must be up to 64 letters, digits, dots, hyphens and underscores, but got"
            f" {name!r}."
        ) from error
    console.print_answer(
        {**added.model_dump(), "sign_in_url": link}, f"The user {name} is added. {link}"
    )


@user_app.command("list", is_list=True)
def list_users() -> None:
    """List the users, with those that were removed."""

    with connect() as client:
        users = client.list_users()
    console.print_list(
        users,
        ["Name", "Group", "Rights", "Password", "OIDC", "State"],
        [
            (
                one.name,
                one.group,
                "administrator" if one.is_admin else "by project",
                "yes" if one.has_password else "no",
                one.oidc,
                "removed" if not one.is_active else "service" if one.is_service else "active",
            )
            for one in users
        ],
    )


@user_app.command("remove")
def remove_user(name: UserName) -> None:
    """Remove a user. Tokens and sign-ins end. Experiments stay, and trials continue."""

    with connect() as client:
        client.remove_user(name)
    console.print_answer({"user": name}, f"The user {name} is removed.")


@user_app.command("group")
def set_group(
    name: UserName,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group, or none.")],
) -> None:
    """Put a user into a group, or into none. A group ends with its last member."""

    with connect() as client:
        client.set_group(name, None if group == "none" else group)
    text = f"The user {name} is in {'no group' if group == 'none' else f'the group {group}'}."
    console.print_answer({"user": name, "group": None if group == "none" else group}, text)


@user_app.command("link")
def link_user(
    name: UserName,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="Id of the person at the provider, none to end the link, or * for the first person"
            " of the name who signs in.",
        ),
    ] = "*",
) -> None:
    """Link a user to a person who signs in by OpenID Connect. Sign-ins of the user end."""

    with connect() as client:
        client.link_user(name, None if subject == "none" else subject)
    who = {"none": "nobody", "*": f"the first {name}"}.get(subject, f"the person {subject}")
    text = f"The user {name} is linked to {who} at the provider."
    console.print_answer({"user": name, "subject": None if subject == "none" else subject}, text)


@user_app.command("role")
def set_role(
    name: UserName,
    role: Annotated[
        Literal["viewer", "editor", "admin", "none"] | None,
        typer.Argument(metavar="ROLE", help="viewer, editor, admin or none."),
    ] = None,
    project: Annotated[str, typer.Option(metavar="NAME", help="Project.")] = "Default",
    admin: Annotated[
        bool | None,
        typer.Option("--admin/--no-admin", help="Administrator of the master, or not."),
    ] = None,
) -> None:
    """Set the role of a user in a project, or make the user an administrator."""

    if (role is None) == (admin is None):
        raise CommandError("Either `ROLE` or `--admin`/`--no-admin` must be given.")
    with connect() as client:
        if role is not None:
            client.set_role(name, None if role == "none" else role, project=project)
            text = f"The role of {name} in {project} is {role}."
        else:
            client.set_admin(name, bool(admin))
            text = f"The user {name} is {'an' if admin else 'no'} administrator."
    console.print_answer({"user": name, "project": project, "role": role, "is_admin": admin}, text)


@project_app.command("create")
def create_project(name: ProjectName) -> None:
    """Create a project without members. Administrators see it."""

    try:
        with connect() as client:
            project = client.create_project(name)
    except ValueError as error:
        raise CommandError(
            "`NAME` must begin with a letter or digit and have up to 64 letters, digits, spaces,"
            f" dots, hyphens and underscores, but got {name!r}."
        ) from error
    console.print_answer(project, f"The project {name} is created.")


@project_app.command("list", is_list=True)
def list_projects() -> None:
    """List the projects, with your role in each."""

    with connect() as client:
        projects = client.list_projects()
    console.print_list(projects, ["Name", "Role"], [(one.name, one.role.value) for one in projects])


@project_app.command("members", is_list=True)
def list_members(name: ProjectName) -> None:
    """List the members of a project and their roles."""

    with connect() as client:
        members = client.list_members(name)
    console.print_list(members, ["User", "Role"], [(one.user, one.role.value) for one in members])


@project_app.command("delete")
def delete_project(name: ProjectName) -> None:
    """Delete an empty project, with its roles, quota, templates and policies."""

    with connect() as client:
        client.delete_project(name)
    console.print_answer({"project": name}, f"The project {name} is deleted.")


_USAGE_KEYS = ("month", "user", "project", "pool")


def usage(
    month: Annotated[
        str | None, typer.Option(metavar="YYYY-MM", help="Month in UTC. Default: this month.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="YYYY-MM", help="First month of several.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="Sum up by month, user, project or pool. Repeatable."),
    ] = None,
) -> None:
    """List slot hours, GPU hours, lost work and goodput by month, user, project and pool."""

    for option, given in (("--month", month), ("--since", since)):
        if given is not None and not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", given):
            raise CommandError(f"`{option}` must be a month such as 2026-11, but got {given!r}.")
    keys = by or list(_USAGE_KEYS)
    if not set(keys) <= set(_USAGE_KEYS):
        raise CommandError(f"`--by` must be one of {', '.join(_USAGE_KEYS)}, but got {keys!r}.")
    with connect() as client:
        rows = client.usage(since=since or month, until=month, by=by)
    numbers = ["Trials", "Slot hours", "GPU hours", "Hours waited", "Hours lost", "Goodput"]
    console.print_list(
        rows,
        [*(key.capitalize() for key in keys), *numbers],
        [
            (
                *(getattr(row, key) for key in keys),
                row.num_trials,
                f"{row.slot_hours:.2f}",
                f"{row.gpu_hours:.2f}",
                f"{row.wait_hours:.2f}",
                f"{row.lost_hours:.2f}",
                f"{row.training_hours / row.known_hours:.1%}" if row.known_hours else None,
            )
            for row in rows
        ],
        right=numbers,
    )


def audit(
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show only requests of this user.")
    ] = None,
    limit: options.Limit = 20,
) -> None:
    """List who changed what, newest first."""

    with connect() as client:
        entries = client.audit(user=user, limit=limit)
    console.print_list(
        entries,
        ["Time", "User", "Token", "Request", "Objects", "Status"],
        [
            (
                console.format_moment(one.time),
                one.user,
                one.token or "browser",
                one.action,
                ", ".join(one.objects),
                one.status,
            )
            for one in entries
        ],
        right=["Status"],
    )


@user_app.command("set-password")
def set_password(
    password: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Password, at least 8 characters. By default the command asks for it.",
        ),
    ] = None,
    user: Annotated[str, typer.Option(metavar="NAME", help="Name of the user.")] = "admin",
) -> None:
    """Set the password for the web UI. This ends all sign-ins of the user."""

    if password is None:
        password = _ask_password(is_new=True)
    try:
        with connect() as client:
            client.set_password(password, user=user)
    except ValueError as error:
        raise CommandError(str(error)) from error
    console.print_answer({"user": user}, f"The password of {user} is set.")
