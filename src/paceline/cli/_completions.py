"""Completions of arguments in a shell, from what the master has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

_TIMEOUT_S = 0.5
_MOST = 100
# Trials and checkpoints of older experiments would take a request for each.
_NUM_EXPERIMENTS = 5
Suggestions = list[tuple[str, str]]


def complete_experiment(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest numbers of experiments, with their names."""
    rows = _rows(ctx, "experiments", limit=_MOST)
    return _suggestions(((one["id"], one["name"]) for one in rows), incomplete)


def complete_trial(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest numbers of trials of the newest experiments, with their states."""
    rows = _rows_of_newest(ctx, "trials")
    texts = ((one["id"], f"{one['shown_state']}, {name}") for name, one in rows)
    return _suggestions(texts, incomplete)


def complete_checkpoint(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest UUIDs of checkpoints of the newest experiments, with their batches."""
    rows = _rows_of_newest(ctx, "checkpoints")
    texts = ((one["uuid"], f"batch {one['steps_completed']}, {name}") for name, one in rows)
    return _suggestions(texts, incomplete)


def complete_node(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest names of nodes, with their states."""
    rows = _rows(ctx, "nodes", include_local=True)
    return _suggestions(((one["name"], one["state"]) for one in rows), incomplete)


def complete_pool(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest names of pools, with their policies."""
    rows = _rows(ctx, "pools")
    return _suggestions(((one["name"], one["policy"]) for one in rows), incomplete)


def complete_token(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest names of valid tokens, with their scopes."""
    rows = [one for one in _rows(ctx, "tokens") if one["revoked_at"] is None]
    return _suggestions(((one["name"], one["scope"]) for one in rows), incomplete)


def complete_run(incomplete: str) -> Suggestions:
    """Suggest names of runs in ./paceline_runs."""
    names = sorted(path.parent.name for path in Path("paceline_runs").glob("*/run.json"))
    texts = [(name, "") for name in names[-_MOST:]]
    return _suggestions([*texts, *([("last", "the newest")] if texts else [])], incomplete)


def _suggestions(texts: Any, incomplete: str) -> Suggestions:
    return [(str(word), help) for word, help in texts if str(word).startswith(incomplete)]


def _rows_of_newest(ctx: typer.Context, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the experiment's name and the row, for the rows below the newest experiments."""
    for experiment in _rows(ctx, "experiments", limit=_NUM_EXPERIMENTS):
        for row in _rows(ctx, f"experiments/{experiment['id']}/{kind}", limit=_MOST):
            yield experiment["name"], row


def _rows(ctx: typer.Context, path: str, **params: Any) -> list[dict[str, Any]]:
    """Return the rows of a list of the master; none if it does not answer in time."""
    from paceline.client._http_session import HttpSession

    try:
        with HttpSession(ctx.find_root().params.get("master")) as session:
            answer = session.http().get(path, params=params, timeout=_TIMEOUT_S).json()
            return list(answer["items"] if isinstance(answer, dict) else answer)
    except Exception:
        # Whatever is wrong, a shell that waits for suggestions has no place for a message.
        return []
