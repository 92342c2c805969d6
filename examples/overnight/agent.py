"""An agent's loop: search, propose, train the best for longer, and check whether it is real."""

import argparse
import random
from pathlib import Path
from typing import Any

from paceline.client import ApiError, Client, Experiment

HERE = Path(__file__).parent


def propose(trials: list[Any], number: int) -> tuple[dict[str, Any], str]:
    """Return hyperparameters to try and the reason; a language model would read the trials."""
    rng = random.Random(number)
    measured = [trial for trial in trials if trial.best_metric is not None]
    best = min(measured, key=lambda trial: trial.best_metric, default=None)
    lr = 10 ** rng.uniform(-3, 0)
    if best is None:
        return {"lr": lr}, "nothing is known yet"
    lr = min(max(best.hparams["lr"] * 10 ** rng.uniform(-0.5, 0.5), 1e-3), 1.0)
    return {"lr": lr, "width": best.hparams["width"]}, f"near trial {best.id}, the best so far"


def search(client: Client, name: str, num_proposals: int) -> Experiment:
    """Run a search with proposals; go on with it if it runs or has ended already."""
    found = client.create_experiment(HERE / "config.yaml", HERE, key=f"{name}-search")
    # What was proposed before the agent was killed is not proposed again.
    for number in range(len(found.proposals()), num_proposals):
        hparams, why = propose(found.trials(), number)
        try:
            found.propose(hparams, why=why, by="agent", key=f"{name}-{number}")
        except ApiError as error:
            if error.code not in ("search_ended", "no_trial_left"):
                raise
            break
    found.wait()
    return found.reload()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="overnight", help="the night; another one starts anew")
    parser.add_argument("--proposals", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="batches of the longer training")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with Client() as client:
        found = search(client, given.name, given.proposals)
        best, *_, worst = found.trials(sort_by="metric")
        print(f"Best: trial {best.id}, {found.metric} {best.best_metric:.4g}, {best.hparams}")
        changes = {"hyperparameters": {"steps": given.steps}}
        longer = best.continue_(changes, key=f"{given.name}-longer")
        longer.wait()
        key = f"{given.name}-repeats"
        for one in found.repeat(given.seeds, trial=best.id, baseline=worst.id, key=key):
            one.wait()
        told = found.repeats()
        print(f"Trained for longer: {longer.reload().best_metric:.4g}")
        print(f"Gain over trial {told.baseline}: {told.gain:.4g}, real: {told.is_real}")


if __name__ == "__main__":
    main()
