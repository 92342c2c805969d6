"""Tables of what the time of a trial or run went to."""

from typing import Any

_LABELS = {
    "training_s": "Training",
    "data_wait_s": "Waiting for data",
    "validation_s": "Validation",
    "checkpoint_s": "Checkpoints",
    "lost_s": "Lost work",
    "start_s": "Starts",
    "other_s": "Other",
    "undivided_s": "Not divided",
    "waiting_s": "No process",
}
_MEANINGS = {
    "training_s": "steps whose result was kept",
    "data_wait_s": "devices idle until data came",
    "validation_s": "measuring on other data",
    "checkpoint_s": "training stood still to store state",
    "lost_s": "trained after the last checkpoint before a stop",
    "start_s": "from the launch of a process to its first step",
    "other_s": "between and after trainings",
    "undivided_s": "the script does not tell what it does",
    "waiting_s": "queued, paused, or before a restart",
}


def print_time_table(seconds: dict[str, float], total_s: float, goodput: float | None) -> None:
    """Print the shares of a time that are not zero, and the goodput."""
    from paceline.cli._console_output import console, format_duration, print_table

    rows: list[tuple[Any, ...]] = [
        (
            label,
            f"{seconds[name]:,.1f} s",
            f"{seconds[name] / total_s:.1%}",
            _MEANINGS[name],
        )
        for name, label in _LABELS.items()
        if seconds[name] > 0
    ]
    print_table(
        ["Share", "Time", "Of all", "What it is"],
        rows,
        right=["Time", "Of all"],
        empty="No time was recorded.",
    )
    if goodput is not None:
        used_s = total_s - seconds["waiting_s"]
        told = f"Goodput {goodput:.1%}: of {format_duration(used_s)} with processes,"
        console().print(f"\n{told} {format_duration(seconds['training_s'])} trained.")
