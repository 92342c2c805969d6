"""A search method in a program of its own, over the API: halving with proposals near the best.

Usage: python search.py EXPERIMENT_ID. The master has all that it decides from, so it may be killed
and started again at any time.
"""

import random
import sys
from typing import Any

from paceline.client import Client, Experiment, Trial

RUNGS = (20, 40)
LEAST_AT_RUNG = 3
# The search ends once so many trials in a row were no better than the best before.
PATIENCE = 8


def main(experiment_id: int) -> None:
    with Client() as client:
        experiment = client.get_experiment(experiment_id)
        while not experiment.reload().state.is_terminal:
            found = experiment.asks(wait_s=0.2)
            seen = [each for each in found.observations if each.loss is not None]
            for ask in found.asks:
                hparams, why = proposal(ask, seen)
                experiment.answer(ask, hparams, why=why, by="halving")
            losses = losses_by_rung(experiment)
            for trial in experiment.trials():
                if not trial.state.is_terminal and is_loser(trial, losses):
                    trial.stop()
            # Lists of trials are in the order of their creation.
            ended = [each.loss for each in seen if each.state != "running"]
            if len(ended) > PATIENCE and min(ended[-PATIENCE:]) >= min(ended[:-PATIENCE]):
                experiment.edit(limits={"max_trials": len(found.observations)})


def proposal(ask: Any, seen: list[Any]) -> tuple[dict[str, float], str]:
    """Return hyperparameters for a trial: those of the best one, changed; at first at random."""
    draw = random.Random(ask.id)
    if len(seen) < 4:
        return {"lr": ask.hparams["lr"]}, "one of the first trials"
    best = min(seen, key=lambda each: each.loss)
    lr = min(max(best.hparams["lr"] * 10 ** draw.gauss(0.0, 0.2), 1e-3), 1.0)
    momentum = min(max(best.hparams["momentum"] + draw.gauss(0.0, 0.1), 0.0), 0.95)
    return {"lr": lr, "momentum": momentum}, f"near the best so far, with loss {best.loss:.3g}"


def losses_by_rung(experiment: Experiment) -> dict[int, dict[int, float]]:
    """Return the loss of each trial at each rung that it has reached."""
    found: dict[int, dict[int, float]] = {rung: {} for rung in RUNGS}
    for trial in experiment.trials():
        for row in trial.iter_metrics("validation"):
            if row.steps_completed in found:
                found[row.steps_completed][trial.id] = row.metrics["loss"]
    return found


def is_loser(trial: Trial, losses: dict[int, dict[int, float]]) -> bool:
    """Return whether a trial is in the worse half of those that have reached one of its rungs."""
    for at_rung in losses.values():
        if trial.id in at_rung and len(at_rung) >= LEAST_AT_RUNG:
            rank = sorted(at_rung.values()).index(at_rung[trial.id])
            if rank >= len(at_rung) / 2:
                return True
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
