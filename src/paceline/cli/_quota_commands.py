"""Commands `paceline quota`: shares and limits of users, groups and projects."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._command_classes import CommandGroup
from paceline.cli._console_output import format_bytes, print_answer, print_list
from paceline.cli._options_and_errors import CommandError, connect

if TYPE_CHECKING:
    from paceline._cluster.messages.master_models import Quota
    from paceline.client._client import Client

quota_app = CommandGroup(help="Show and set shares and limits of users, groups and projects.")

_User = Annotated[str | None, typer.Option("--user", metavar="NAME", help="User.")]
_Project = Annotated[str | None, typer.Option("--project", metavar="NAME", help="Project.")]
_Group = Annotated[str | None, typer.Option("--group", metavar="NAME", help="Group of users.")]
_Revision = Annotated[
    int | None,
    typer.Option(metavar="N", help="Refuse unless this is the newest revision, see `quota list`."),
]
_NONE = "none"


@quota_app.command("list", is_list=True)
def list_quotas() -> None:
    """List quotas and their use: your own, and those of your projects."""

    with connect() as client:
        quotas = client.quotas()
    print_list(
        quotas,
        ["User", "Group", "Project", "Weight", "Slots", "Slot hours", "Checkpoints", "Revision"],
        [
            (
                one.user,
                one.group,
                one.project,
                None if one.project else f"{one.weight:g}",
                _used(one.num_slots_used, one.max_slots),
                _used(f"{one.slot_hours_used:.2f}", one.slot_hours),
                _used(
                    format_bytes(one.checkpoint_bytes_used),
                    None if one.checkpoint_bytes is None else format_bytes(one.checkpoint_bytes),
                ),
                one.revision,
            )
            for one in quotas
        ],
        right=["Weight", "Slots", "Slot hours", "Checkpoints", "Revision"],
        empty="There are no quotas that you see.",
    )


def _used(used: object, limit: float | str | None) -> str:
    if limit is None:
        return f"{used}"
    return f"{used} of {limit if isinstance(limit, str) else format(limit, 'g')}"


@quota_app.command("set")
def set_quota(
    user: _User = None,
    project: _Project = None,
    group: _Group = None,
    weight: Annotated[
        float | None,
        typer.Option(metavar="X", help="Weight of the user or group in pools of fair shares."),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="N", help="Slots in use at once, or none for no limit.")
    ] = None,
    slot_hours: Annotated[
        str | None, typer.Option(metavar="H", help="Slot hours in each month of UTC, or none.")
    ] = None,
    checkpoint_gib: Annotated[
        str | None, typer.Option(metavar="GIB", help="GiB of checkpoints, or none.")
    ] = None,
    revision: _Revision = None,
) -> None:
    """Set limits. Those not given stay. Trials that run go on, others wait and say why."""

    owner = _owner(user, group, project)
    if weight is not None and project is not None:
        raise CommandError("`--weight` is for a user or a group, but got a project.")
    with connect() as client:
        before = _find(client, owner)
        limits: dict[str, Any] = {
            "weight": 1.0 if before is None else before.weight,
            "max_slots": None if before is None else before.max_slots,
            "slot_hours": None if before is None else before.slot_hours,
            "checkpoint_bytes": None if before is None else before.checkpoint_bytes,
        }
        for name, option, text, scale in (
            ("max_slots", "--slots", slots, 1),
            ("slot_hours", "--slot-hours", slot_hours, 1),
            ("checkpoint_bytes", "--checkpoint-gib", checkpoint_gib, 2**30),
        ):
            if text is not None:
                limits[name] = _limit(option, text, scale, is_whole=name != "slot_hours")
        if weight is not None:
            limits["weight"] = weight
        newest = 0 if before is None else before.revision
        try:
            client.set_quota(
                **owner,
                revision=newest if revision is None else revision,
                **limits,
            )
        except ValueError as error:
            raise CommandError(f"The limits must be in their ranges, but: {error}") from error
        after = _find(client, owner)
    [name] = owner.values()
    print_answer(after, f"The quota of {name} is set. `paceline quota list` shows it.")


@quota_app.command("delete")
def delete_quota(
    user: _User = None, project: _Project = None, group: _Group = None, revision: _Revision = None
) -> None:
    """Delete share and limits: weight 1, and no limit."""

    owner = _owner(user, group, project)
    with connect() as client:
        before = _find(client, owner)
        newest = 1 if before is None else before.revision
        client.delete_quota(**owner, revision=newest if revision is None else revision)
    text = f"The quota of {user or group or project} is deleted."
    print_answer({"user": user, "project": project, "group": group}, text)


def _owner(user: str | None, group: str | None, project: str | None) -> dict[str, Any]:
    """Return the one whose quota it is, by kind."""
    given = {"user": user, "group": group, "project": project}
    owner = {kind: name for kind, name in given.items() if name is not None}
    if len(owner) != 1:
        raise CommandError("One of `--user`, `--group` and `--project` must be given.")
    return owner


def _find(client: "Client", owner: dict[str, Any]) -> "Quota | None":
    [(kind, name)] = owner.items()
    return next((one for one in client.quotas() if getattr(one, kind) == name), None)


def _limit(option: str, text: str, scale: int, *, is_whole: bool) -> float | None:
    if text == _NONE:
        return None
    try:
        value = float(text) * scale
        return int(value) if is_whole and (scale > 1 or value.is_integer()) else value
    except (ValueError, OverflowError) as error:
        raise CommandError(f"`{option}` must be a number, or none, but got {text!r}.") from error
