"""Measure the speed of a search: decisions of adaptive ASHA, and ask and tell with a TPE.

Usage: python benchmarks/search_speed.py [--trials N] [--asked N].
"""

import argparse
import gc
import importlib
import importlib.util
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from figures import Figure, print_table

from paceline.config import validate_config
from paceline.search import Sampler
from paceline.search._preview_and_simulation import Curve, run_on_slots
from paceline.search._samplers import make_sampler
from paceline.search._search import Search
from paceline.train import Study

_NAMES = [f"x{index}" for index in range(5)]
SPACE: dict[str, Any] = {name: {"type": "double", "minval": 0.0, "maxval": 1.0} for name in _NAMES}
_SLOTS, _LENGTH = 64, 256


class _Timed:
    """Search that measures its decisions."""

    asks = ()

    def __init__(self, search: Search) -> None:
        self._search = search
        self.seconds: list[float] = []

    def apply(self, given: Any) -> Any:
        """Take an input, and keep how long its decision took."""
        begun = time.thread_time()
        operations = self._search.apply(given)
        self.seconds.append(time.thread_time() - begun)
        return operations


def decisions(num_trials: int) -> list[Figure]:
    """Return the rate of decisions on simulated trials, their spread, and the memory."""
    searcher = {
        "name": "adaptive_asha", "metric": "loss", "max_trials": num_trials,
        "max_concurrent_trials": _SLOTS, "max_length": {"epochs": _LENGTH},
    }  # fmt: skip
    config = validate_config(
        {"entrypoint": "x", "searcher": searcher, "hyperparameters": SPACE}
    ).search_config()
    levels = iter(np.random.default_rng(0).random(10 * num_trials).tolist())

    def curve(create: Any) -> Curve:
        return Curve(hparams={}, points=[(float(_LENGTH), next(levels))])

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timed = _Timed(Search(config, SPACE, 0))
    begun = time.process_time()
    run_on_slots(config, timed, lambda: None, curve, slots=_SLOTS)  # type: ignore[arg-type, return-value]
    whole = time.process_time() - begun
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    number = len(timed.seconds)
    parts = np.array_split(np.array(timed.seconds), 10)
    tails = [float(np.quantile(part, 0.99)) * 1e6 for part in parts]
    return [
        Figure(
            what=f"decisions on {num_trials:,} trials of adaptive ASHA", unit="/s",
            values=[number / whole], bar=20_000, is_smaller_better=False,
            beside="with the simulator, by processor time",
        ),
        Figure(
            what="a decision, p99 of the last tenth", unit="us", values=[tails[-1]], bar=None,
            beside=f"first tenth: {tails[0]:,.0f} us", raw=tails,
        ),
        Figure(what="memory that it adds", unit="MB", values=[grown / 1024], bar=500),
    ]  # fmt: skip


def loss_of(hparams: dict[str, Any]) -> float:
    """Return the loss of a point."""
    return float(sum((hparams[name] - 0.3) ** 2 for name in _NAMES))


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _optuna_alone(num_trials: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # It has a price, and trials that run at once need it.
    sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    spaces: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in _NAMES
    }
    for _ in range(num_trials):
        trial = study.ask(spaces)
        study.tell(trial, loss_of(trial.params))


def _study(num_trials: int, sampler: Sampler) -> None:
    study = Study(SPACE, sampler=sampler, seed=0)
    for _ in range(num_trials):
        trial = study.ask()
        assert trial is not None
        study.tell(trial, loss_of(trial.hparams))


def _rustuna(num_trials: int) -> None:
    rustuna = importlib.import_module("rustuna")
    study = rustuna.create_study(sampler=rustuna.samplers.TPESampler(seed=0))

    def objective(trial: Any) -> float:
        return loss_of({name: trial.suggest_float(name, 0.0, 1.0) for name in _NAMES})

    study.optimize(objective, n_trials=num_trials)


def asks(num_trials: int) -> list[Figure]:
    """Return what ask and tell takes beyond the sampler's own time, in this process."""
    beside = _seconds(lambda: _optuna_alone(num_trials))
    ours = _seconds(lambda: _study(num_trials, make_sampler("optuna", {}, 0)))
    own = _seconds(lambda: _study(num_trials, make_sampler("tpe", {}, 0)))
    text = f"Study {ours:.2f} s, Optuna alone {beside:.2f} s, Study with our TPE {own:.2f} s"
    if importlib.util.find_spec("rustuna") is not None:
        text += f", Rustuna {_seconds(lambda: _rustuna(num_trials)):.2f} s"
    return [
        Figure(
            what=f"ask and tell of {num_trials:,} trials beyond Optuna's TPE", unit="s",
            values=[ours - beside], bar=0.5, beside=text,
        )
    ]  # fmt: skip


def main() -> None:
    """Measure both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--asked", type=int, default=1000)
    given = parser.parse_args()
    figures = decisions(given.trials) + asks(given.asked)
    print_table(figures)
    print(flush=True)


if __name__ == "__main__":
    main()
