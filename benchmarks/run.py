"""Measure what Paceline promises and print a table; raw figures go to `benchmarks/results/`.

Usage: python benchmarks/run.py [NAME ...]. Each figure is measured several times, next to the
alternative in the same run where there is one; the table gives median, minimum and maximum.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import bench_cases
import data_cases
import data_scale
import read_cases
import runner_cases
import scheduling_cases
import store_cases
import training_cases
import trial_cases
import webui_cases
import worker_cases
from bench_cases import Figure

CASES = bench_cases.CASES | training_cases.CASES | worker_cases.CASES | store_cases.CASES
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    named = training_cases.NAMED_CASES | worker_cases.NAMED_CASES
    named |= data_cases.NAMED_CASES | {"data-scale": data_scale.measure_scale}
    named |= read_cases.NAMED_CASES | trial_cases.NAMED_CASES | scheduling_cases.NAMED_CASES
    named |= runner_cases.NAMED_CASES
    cases = CASES | named | webui_cases.NAMED_CASES
    parser.add_argument("names", nargs="*", choices=[*cases, []], help=", ".join(cases))
    chosen = parser.parse_args().names or list(CASES)
    figures: list[Figure] = []
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        figures += cases[name]()
    print_table(figures)
    store(figures)


def print_table(figures: list[Figure]) -> None:
    """Print all figures as a Markdown table."""
    print("| what | median | min | max | bar | met | beside it in the same run |")
    print("|---|---|---|---|---|---|---|")
    for figure in figures:
        cells = [figure.shown(v) for v in (figure.median, min(figure.values), max(figure.values))]
        bar, met = "-", "-"
        if figure.bar is not None:
            bar = f"{'<=' if figure.is_smaller_better else '>='} {figure.shown(figure.bar)}"
            met = "yes" if figure.is_met else "**no**"
        print(f"| {figure.what} | {' | '.join(cells)} | {bar} | {met} | {figure.beside} |")


def store(figures: list[Figure]) -> None:
    """Keep the raw figures with the machine they were measured on."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    lines = ",\n".join(json.dumps(figure.to_json()) for figure in figures)
    path.write_text(f'{json.dumps(record)[:-1]}, "figures": [\n{lines}\n]}}\n')
    print(f"\nraw figures: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
