"""Commands `paceline slot` and `paceline job`: devices, and the queue for them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import typer

from paceline.cli._command_classes import CommandGroup
from paceline.cli._completions import complete_node
from paceline.cli._console_output import Age, format_bytes, format_moment, print_answer, print_list
from paceline.cli._options_and_errors import CommandError, ExperimentId, Limit, connect

if TYPE_CHECKING:
    from paceline._cluster.messages.master_models import Slot
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
        (f"{number} x " if number > 1 else "") + (format_bytes(size) if size else "unknown")
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
    print_list(
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
    print_answer(changed, text)


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
    limit: Limit = 100,
) -> None:
    """List the trials waiting for slots, the next first, with the reason of each wait."""

    with connect() as client:
        queue = client.queue(pool=pool, limit=limit)
    print_list(
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
                Age(entry.waiting_since),
                entry.detail
                + f" Estimated start: {format_moment(entry.estimated_start)}."
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
    experiment: ExperimentId,
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
        print_answer(
            client.queue(limit=_MOST_WAITING),
            f"Experiment {experiment} is moved. `paceline job list` shows the order.",
        )


def _rank(priority: int | None, weight: float | None) -> str:
    if priority is not None:
        return f"priority {priority}"
    return "" if weight is None else f"weight {weight:g}"
