"""Commands `paceline slot`, `job`, `quota` and `notify`: devices, their queue and shares."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._completions import complete_node
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline._cluster.messages.master_models import Quota, Slot
    from paceline.client._client import Client


# The most that the master lists at once.
_MOST_WAITING = 1000


class _SlotCounts(Protocol):
    @property
    def num_slots_used(self) -> int: ...
    @property
    def num_slots_drained(self) -> int: ...
    @property
    def num_slots_draining(self) -> int: ...


def slots_text(counts: _SlotCounts, num_slots: int, *, verb: str = "") -> str:
    """Return the numbers of usable slots in use and of drained slots, as text.

    Args:
        counts: How many are in use, drained, and both.
        num_slots: How many there are, drained ones among them.
        verb: The words behind the numbers, such as ` in use`.
    """
    used = counts.num_slots_used - counts.num_slots_draining
    text = f"{used} of {num_slots - counts.num_slots_drained}{verb}"
    if counts.num_slots_drained:
        text += f", {counts.num_slots_drained} drained"
    if counts.num_slots_draining:
        text += f" ({counts.num_slots_draining} still in use)"
    return text


def memory_text(sizes: Sequence[int]) -> str | None:
    """Return the memory of devices, for example `4 x 79.6 GiB`; None if unknown."""

    if not any(sizes):
        return None
    # The order is that of the slots.
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return ", ".join(
        (f"{number} x " if number > 1 else "") + (console.format_bytes(size) if size else "unknown")
        for size, number in runs
    )


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels as `k=v, k=v`."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())


slot_app = CommandGroup(help="Show and drain the devices for trials.")


_Node = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="Name of its node; `local` is the master's machine.",
        autocompletion=complete_node,
    ),
]
_Slot = Annotated[int, typer.Argument(metavar="SLOT", min=0, help="Number of the slot.")]


@slot_app.command("list", is_list=True)
def list_slots() -> None:
    """List the slots with their trials."""

    with connect() as client:
        slots = client.slots()
    has_memory = any(slot.memory_bytes for slot in slots)
    console.print_list(
        slots,
        [
            *("Node", "Slot", "Device", *(["Memory"] if has_memory else [])),
            *("Pool", "State", "Experiment", "Trial"),
        ],
        [
            (
                *(slot.node, slot.id, slot.device),
                *([memory_text([slot.memory_bytes or 0])] if has_memory else []),
                *(slot.pool, _slot_state(slot), slot.experiment_id, slot.trial_id),
            )
            for slot in slots
        ],
        right=["Slot", "Memory", "Experiment", "Trial"],
        empty="The master has no slots.",
    )


@slot_app.command("drain")
def drain(
    node: _Node,
    slot: _Slot,
    finish: Annotated[
        bool, typer.Option("--finish", help="Let a trial that runs there end there.")
    ] = False,
) -> None:
    """Place no more trials on a slot. Its trial stores a checkpoint and continues elsewhere."""

    with connect() as client:
        client.drain_slot(node, slot, finish=finish)
        undo = f"`paceline slot resume {node} {slot}` undoes it."
        _print_slot(client, node, slot, f"The slot {slot} of {node} gets no more trials. {undo}")


def _print_slot(client: "Client", node: str, slot: int, text: str) -> None:

    [changed] = [one for one in client.slots() if (one.node, one.id) == (node, slot)]
    console.print_answer(changed, text)


@slot_app.command("resume")
def resume(node: _Node, slot: _Slot) -> None:
    """Use a drained slot again."""

    with connect() as client:
        client.resume_slot(node, slot)
        _print_slot(client, node, slot, f"The slot {slot} of {node} gets trials again.")


def _slot_state(slot: "Slot") -> str:
    if slot.is_drained:
        return "drained" if slot.trial_id is None else "draining"
    return "free" if slot.trial_id is None else "in use"


queue_app = CommandGroup(
    help="Show and change the order in which experiments get slots.",
)


@queue_app.command("list", is_list=True)
def list_jobs(
    pool: Annotated[
        str | None, typer.Option("--pool", metavar="NAME", help="Show only this pool.")
    ] = None,
    limit: options.Limit = 100,
) -> None:
    """List the trials waiting for slots, the next first, with the reason of each wait."""

    with connect() as client:
        queue = client.queue(pool=pool, limit=limit)
    console.print_list(
        queue,
        ["Pool", "Ahead", "Trial", "Experiment", "Slots", "Rank", "Waits since", "Why"],
        [
            (
                entry.pool,
                entry.num_ahead,
                entry.trial_id,
                f"{entry.experiment_id} {entry.experiment_name}",
                entry.num_slots,
                _rank(entry.priority, entry.weight),
                console.Age(entry.waiting_since),
                entry.detail
                + f" Estimated start: {console.format_moment(entry.estimated_start)}."
                * (entry.estimated_start is not None),
            )
            for entry in queue
        ],
        right=["Ahead", "Trial", "Slots"],
        shortened=["Experiment"],
        wrapped="Why",
        empty=f"Nothing waits for slots{'' if pool is None else f' in the pool {pool!r}'}.",
    )


@queue_app.command("move")
def move(
    experiment: options.ExperimentId,
    ahead_of: Annotated[
        int | None,
        typer.Option("--ahead-of", metavar="ID", help="Move it directly ahead of this experiment."),
    ] = None,
    behind: Annotated[
        int | None,
        typer.Option("--behind", metavar="ID", help="Move it directly behind this experiment."),
    ] = None,
    front: Annotated[bool, typer.Option("--front", help="Move it to the front.")] = False,
    end: Annotated[bool, typer.Option("--end", help="Move it to the end.")] = False,
) -> None:
    """Move an experiment in the queue of its pool, among those of the same priority."""

    num_given = [ahead_of is not None, behind is not None, front, end].count(True)
    if num_given != 1:
        raise CommandError(
            "One of `--ahead-of ID`, `--behind ID`, `--front` and `--end` must be given, but got"
            f" {num_given}."
        )
    to: Literal["front", "end"] | None = "front" if front else "end" if end else None
    with connect() as client:
        client.move_in_queue(experiment, ahead_of=ahead_of, behind=behind, to=to)
        console.print_answer(
            client.queue(limit=_MOST_WAITING),
            f"Experiment {experiment} is moved. `paceline job list` shows the order.",
        )


def _rank(priority: int | None, weight: float | None) -> str:
    if priority is not None:
        return f"priority {priority}"
    return "" if weight is None else f"weight {weight:g}"


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
    console.print_list(
        quotas,
        [
            "User",
            "Group",
            "Project",
            "Weight",
            "Slots",
            "Slot hours",
            "Checkpoints",
            "Media",
            "Revision",
        ],
        [
            (
                one.user,
                one.group,
                one.project,
                None if one.project else f"{one.weight:g}",
                _used(one.num_slots_used, one.max_slots),
                _used(f"{one.slot_hours_used:.2f}", one.slot_hours),
                _used(
                    console.format_bytes(one.checkpoint_bytes_used),
                    None
                    if one.checkpoint_bytes is None
                    else console.format_bytes(one.checkpoint_bytes),
                ),
                _used(
                    console.format_bytes(one.media_bytes_used),
                    None if one.media_bytes is None else console.format_bytes(one.media_bytes),
                ),
                one.revision,
            )
            for one in quotas
        ],
        right=["Weight", "Slots", "Slot hours", "Checkpoints", "Media", "Revision"],
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
    media_gib: Annotated[
        str | None, typer.Option(metavar="GIB", help="GiB of media and other files, or none.")
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
            "media_bytes": None if before is None else before.media_bytes,
        }
        for name, option, text, scale in (
            ("max_slots", "--slots", slots, 1),
            ("slot_hours", "--slot-hours", slot_hours, 1),
            ("checkpoint_bytes", "--checkpoint-gib", checkpoint_gib, 2**30),
            ("media_bytes", "--media-gib", media_gib, 2**30),
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
    console.print_answer(after, f"The quota of {name} is set. `paceline quota list` shows it.")


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
    console.print_answer({"user": user, "project": project, "group": group}, text)


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


notify_app = CommandGroup(help="Show and test the channels for messages to people.")


@notify_app.command("list", is_list=True)
def list_channels() -> None:
    """List the channels of `notify.yaml` in the master's home, without addresses."""
    with connect() as client:
        channels = client.notify_channels()
    console.print_list(
        channels,
        ["Channel", "Kind", "Waiting", "Given up", "Failure"],
        [
            (one.name, one.kind, one.num_waiting, one.num_dropped, one.failure or "")
            for one in channels
        ],
        right=["Waiting", "Given up"],
        empty="The master has no channels. `notify.yaml` in its home has them.",
    )


@notify_app.command("test")
def test_channel(
    channel: Annotated[str, typer.Argument(metavar="CHANNEL", help="Name of the channel.")],
) -> None:
    """Send a test message to a channel now."""
    with connect() as client:
        outcome = client.test_notify_channel(channel)
    if outcome.failure is not None:
        raise CommandError(f"The message to {channel} could not be sent: {outcome.failure}.")
    console.print_answer(outcome, f"Sent a test message to {channel}.")


_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})=(.{0,200})")


def read_labels(texts: list[str]) -> dict[str, str]:
    """Return labels given as KEY=VALUE."""
    labels = {}
    for text in texts:
        match = _LABEL.fullmatch(text)
        if match is None:
            raise CommandError(f"`--labels` must be KEY=VALUE, but got {text!r}.")
        labels[match[1]] = match[2]
    return labels
