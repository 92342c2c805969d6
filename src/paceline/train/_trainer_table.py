"""A trainer as a table."""

from collections.abc import Sequence
from typing import Any

from paceline.display import html_table
from paceline.workers.runs import GroupSettings

_HEADER = ("rank", "node", "pid", "device", "CPU cores", "GPUs")


def table_of(settings: GroupSettings, num_workers: int, facts: Sequence[Any]) -> str:
    """Return a table of workers, nodes, devices and resources.

    Args:
        settings: What was asked for.
        num_workers: How many workers there are, or are to be started.
        facts: What the workers told; empty before they are started.
    """
    title = title_of(settings, num_workers, facts)
    if settings.limits is None:
        return title
    rows = _table_rows_of(settings, num_workers, facts)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *lines])


def html_of(settings: GroupSettings, num_workers: int, facts: Sequence[Any]) -> str:
    """Return the table of `table_of` for a notebook."""
    title = title_of(settings, num_workers, facts)
    if settings.limits is None:
        return html_table(title, (), ())
    header, *rows = _table_rows_of(settings, num_workers, facts)
    return html_table(title, header, rows)


def _table_rows_of(
    settings: GroupSettings, num_workers: int, facts: Sequence[Any]
) -> list[Sequence[str]]:
    """Return the header and a row for each worker."""
    cores = "shared" if settings.resources.cpus is None else str(settings.resources.cpus)
    gpus = "auto" if settings.resources.gpus is None else f"{settings.resources.gpus:g}"
    more = {name: f"{amount:g}" for name, amount in settings.resources.others.items()}
    rows: list[Sequence[str]] = [(*_HEADER, *more)]
    for rank in range(num_workers):
        fact = facts[rank] if rank < len(facts) else None
        key = (fact.node, str(fact.pid), fact.device) if fact is not None else ("-", "-", "-")
        rows.append((str(rank), *key, cores, gpus, *more.values()))
    return rows


def title_of(settings: GroupSettings, num_workers: int, facts: Sequence[Any]) -> str:
    """Return the line above the table of `table_of`."""
    limits = settings.limits
    if limits is None:
        return "Trainer without workers: functions run in this process."
    # Several nodes of a Ray cluster may be on one machine.
    nodes = {(fact.node, fact.node_rank) for fact in facts}
    where = f"running on {len(nodes)} node(s)" if nodes else "not started"
    backend = settings.config.backend or "gloo, or nccl with GPUs"
    if facts and not settings.config.backend:
        backend = "nccl" if facts[0].device.startswith("cuda") else "gloo"
    bounds = "" if limits.least == limits.most else f" ({limits.least} to {limits.most})"
    return f"Trainer: {num_workers} worker(s){bounds}, {where}, backend {backend}."
