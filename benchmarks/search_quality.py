"""Compare the searches of Paceline with those of others: regret against time, ranks, losses.

Usage: python benchmarks/search_quality.py [--seeds N] [--family NAME ...] [--results FILE]
[--picture FILE]. Every search has four slots for the time of forty whole trainings. Results that
FILE has are not computed again.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from search_rivals import rivals
from search_tasks import FAMILIES, Task, tasks

from paceline.config import validate_config
from paceline.search._preview_and_simulation import preview, run_on_slots
from paceline.search._samplers import answers, asking, make_sampler
from paceline.search._search import Search

SLOTS, WHOLE = 4, 40
# Regret is looked up at these times, in whole trainings of all slots together.
TIMES = (2.5, 5.0, 7.0, 10.0, 14.0, 20.0, 28.0, 40.0)
DEFAULT, CHOICE = "adaptive_asha, tpe", "adaptive_asha, promotion, tpe"
# More lines could not be told apart.
_DRAWN = (
    DEFAULT,
    CHOICE,
    "adaptive_asha",
    "random",
    "random, tpe",
    "Optuna TPE",
    "Optuna Hyperband + TPE",
    "Ray Tune ASHA",
    "SMAC",
)
_ENDLESS = 10**6
# In epochs of a trial: where pauses are dear, a trial that resumes takes as long before it trains.
_RESUMING = 1.0
_OURS: dict[str, dict[str, Any]] = {
    "random": {"name": "random"},
    "adaptive_asha": {"name": "adaptive_asha"},
    "adaptive_asha, promotion": {"name": "adaptive_asha", "promotion": True},
    "adaptive_asha, dear promotion": {"name": "adaptive_asha", "promotion": True},
    "hyperband": {"name": "hyperband"},
    "median_stopping": {"name": "median_stopping"},
}
_TASKS: list[Task] = []


def methods(task: Task) -> list[str]:
    """Return the names of all searches that a task is for."""
    ours = [name for name in _OURS if task.length > 1 or name == "random"]
    return [*ours, *(f"{name}, tpe" for name in ours), *rivals(task.length)]


def run(task: Task, method: str, seed: int) -> dict[str, Any]:
    """Simulate one search; return its regrets at `TIMES`, and the share of slots in use."""
    name, is_asking = method.removesuffix(", tpe"), method.endswith(", tpe")
    section = _OURS.get(name, _OURS["random"])
    length = {"max_length": {"epochs": task.length}}
    most_s = WHOLE / SLOTS * task.whole_s

    def config_of(max_trials: int) -> Any:
        many = {"max_trials": max_trials, "max_concurrent_trials": SLOTS, "metric": "loss"}
        return validate_config(
            {"entrypoint": "x", "searcher": section | many | length, "hyperparameters": task.space}
        ).search_config()

    config = config_of(_ENDLESS)
    if name == "hyperband":
        config = config_of(_num_affordable(config_of, task))
    search: Any
    if name in _OURS:
        search = Search(config, task.space, seed, is_asking=is_asking)
    else:
        search = rivals(task.length)[method](task, seed, SLOTS)
    ask = None
    if is_asking and name in _OURS:
        ask = asking(make_sampler("tpe", {}, seed), search.space, seed)
    found = run_on_slots(
        config,
        search,
        lambda: answers(search, ask, "tpe")[0],
        lambda create: task.curve(create.hparams),
        slots=SLOTS,
        most_s=most_s,
        resume_units=_RESUMING if "dear" in name else 0.0,
    )
    regrets = []
    for time in TIMES:
        best = found.best_at(time / WHOLE * most_s)
        regrets.append(1.0 if best is None else task.regret(best))
    used = found.slot_s / (SLOTS * found.wall_s)
    return {"task": task.name, "method": method, "seed": seed, "regrets": regrets, "used": used}


def _num_affordable(config_of: Callable[[int], Any], task: Task) -> int:
    """Return how many trials a search may have that waits for all of them."""
    number = 2
    while True:
        rows = preview(config_of(number + 1), task.space).rows
        if sum(row.trials * (row.units or 0) for row in rows) > WHOLE * task.length:
            return number
        number += 1


def _run(job: tuple[int, str, int]) -> dict[str, Any]:
    return run(_TASKS[job[0]], *job[1:])


def results_of(
    chosen: Iterable[Task], num_seeds: int, path: Path | None, without: Container[str] = ()
) -> list[dict[str, Any]]:
    """Return the results of all searches, computing those that the file does not have."""
    _TASKS[:] = chosen
    known = {}
    if path is not None and path.exists():
        rows = map(json.loads, path.read_text().splitlines())
        known = {(row["task"], row["method"], row["seed"]): row for row in rows}
    jobs = [
        (index, method, seed)
        for seed in range(num_seeds)
        for index, task in enumerate(_TASKS)
        for method in methods(task)
        if method not in without and (task.name, method, seed) not in known
    ]
    if not jobs:
        return list(known.values())
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for number, row in enumerate(pool.imap_unordered(_run, jobs), 1):
            known[row["task"], row["method"], row["seed"]] = row
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if number % 50 == 0 or number == len(jobs):
                print(f"{number} of {len(jobs)} searches", file=sys.stderr, flush=True)
    return list(known.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table for each family: ranks, regrets, and who beats whom.

    The last columns say on how many tasks our method loses and wins against the row by Wilcoxon's
    paired test over seeds, at 5 %, and its p-value over the pairs of all tasks.
    """
    lines = []
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        families[row["task"].partition(":")[0]].append(row)
    shown = [TIMES.index(time) for time in (5.0, 10.0, 20.0, 40.0)]
    for family, found in families.items():
        by = _by_task(found)
        names = list(next(iter(by.values())))
        num_seeds = len(next(iter(next(iter(by.values())).values())))
        # Whole trainings alone have no adaptive ASHA.
        ours = [
            name if name in names else name.replace("adaptive_asha", "random")
            for name in (DEFAULT, CHOICE)
        ]
        lines += [
            f"\n{family}: {len(by)} tasks, {num_seeds} seeds\n",
            "| method | mean rank after 5, 10, 20, 40 | regret after 5, 10, 20, 40 | slots in use"
            f" | {ours[0]} loses, wins at 10 | at 40 | {ours[1]} at 40 |",
            "|---|---|---|---|---|---|---|",
        ]
        ranks = _ranks(by, names)
        for index in np.argsort(ranks[:, -1]):
            name = names[index]
            regrets = np.mean([each[name].mean(0) for each in by.values()], axis=0)
            used = np.mean([row["used"] for row in found if row["method"] == name])
            cells = [
                name,
                ", ".join(f"{rank:.1f}" for rank in ranks[index, shown]),
                ", ".join(f"{regret:.3f}" for regret in regrets[shown]),
                f"{used:.0%}",
                *(_beaten(by, ours[0], name, TIMES.index(time)) for time in (10.0, 40.0)),
                _beaten(by, ours[1], name, TIMES.index(40.0)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_task(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return regrets by task and method, of shape [seed, time]; seeds that all methods have."""
    seeds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(dict)
    for row in rows:
        seeds[row["task"], row["method"]][row["seed"]] = row["regrets"]
    common = set.intersection(*(set(each) for each in seeds.values()))
    by: dict[str, dict[str, Any]] = defaultdict(dict)
    for (task, method), each in seeds.items():
        by[task][method] = np.array([each[seed] for seed in sorted(common)])
    return by


def _ranks(by: dict[str, dict[str, Any]], names: list[str]) -> Any:
    """Return mean ranks of shape [method, time]; equal regrets share theirs."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]  # It has no types.

    stacked = [np.stack([each[name] for name in names]) for each in by.values()]
    return np.mean([rankdata(each, axis=0).mean(1) for each in stacked], axis=0)


def _beaten(by: dict[str, dict[str, Any]], ours: str, rival: str, at: int) -> str:
    """Return on how many tasks a method loses and wins; see `table`."""
    from scipy.stats import wilcoxon

    if ours == rival or ours not in next(iter(by.values())):
        return "-"
    differences = [each[ours][:, at] - each[rival][:, at] for each in by.values()]
    lost = won = 0
    for difference in differences:
        if difference.any() and wilcoxon(difference).pvalue < 0.05:
            lost += difference.mean() > 0
            won += difference.mean() < 0
    pairs = np.concatenate(differences)
    p = float(wilcoxon(pairs).pvalue) if pairs.any() else 1.0
    return f"{lost}, {won} (p {p:.2g})"


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean regret of some methods against the time, for each family."""
    from matplotlib.figure import Figure

    families = sorted({row["task"].partition(":")[0] for row in rows})
    figure = Figure(figsize=(4 * len(families), 3.6), layout="constrained")
    lines = {}
    for column, family in enumerate(families, 1):
        by = _by_task([row for row in rows if row["task"].startswith(f"{family}:")])
        plot = figure.add_subplot(1, len(families), column)
        for number, name in enumerate(_DRAWN):
            found = [each[name].mean(0) for each in by.values() if name in each]
            if found:
                mean = np.mean(found, axis=0)
                [lines[name]] = plot.plot(TIMES, mean, label=name, marker=".", color=f"C{number}")
        plot.set(xscale="log", yscale="log", title=family, xlabel="whole trainings")
        plot.set_xticks((2.5, 5, 10, 20, 40), ("2.5", "5", "10", "20", "40"))
        plot.minorticks_off()
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=5, fontsize=8)
    figure.axes[0].set_ylabel("regret, mean over tasks")
    figure.savefig(path)


def main() -> None:
    """Run all searches, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="all if none")
    parser.add_argument("--without", action="append", default=[], help="methods to leave out")
    parser.add_argument("--results", type=Path, default=Path("build/search-quality.jsonl"))
    parser.add_argument("--picture", type=Path, help="a file ending in svg, png ...")
    given = parser.parse_args()
    chosen = tasks(given.family or FAMILIES)
    rows = results_of(chosen, given.seeds, given.results, given.without)
    print(table(rows))
    if given.picture is not None:
        picture(rows, given.picture)


if __name__ == "__main__":
    main()
