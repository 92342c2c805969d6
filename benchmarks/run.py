"""Measure what Paceline promises and print a table; raw figures go to `benchmarks/results/`.

Usage: python benchmarks/run.py [NAME ...]. Each figure is measured several times, next to the
alternative in the same run where there is one; the table gives median, minimum and maximum.
"""

import argparse
import sys

import bench_cases
import data_cases
import data_scale
import log_calls
import log_clients
import read_cases
import runner_cases
import scheduling_cases
import store_cases
import training_cases
import trial_cases
import webui_cases
import worker_cases
from figures import Figure, print_table, store

CASES = bench_cases.CASES | training_cases.CASES | worker_cases.CASES | store_cases.CASES


def main() -> None:
    """Run the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    named = training_cases.NAMED_CASES | worker_cases.NAMED_CASES
    named |= data_cases.NAMED_CASES | {"data-scale": data_scale.measure_scale}
    named |= read_cases.NAMED_CASES | trial_cases.NAMED_CASES | scheduling_cases.NAMED_CASES
    named |= runner_cases.NAMED_CASES
    named |= {"log-calls": log_calls.measure_calls, "log-clients": log_clients.measure_clients}
    named |= {"log-threads": log_clients.measure_threads}
    cases = CASES | named | webui_cases.NAMED_CASES
    parser.add_argument("names", nargs="*", choices=[*cases, []], help=", ".join(cases))
    chosen = parser.parse_args().names or list(CASES)
    figures: list[Figure] = []
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        figures += cases[name]()
    print_table(figures)
    store(figures)


if __name__ == "__main__":
    main()
