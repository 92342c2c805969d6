"""Measured figures, their table, and the file that keeps them."""

import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured quantity, its bar if there is one, and what the values come from."""

    what: str
    unit: str
    values: list[float]
    bar: float | None
    is_smaller_better: bool = True
    beside: str = ""
    raw: Any = None

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool:
        """Whether the median meets the bar, if there is one."""
        if self.bar is None:
            return True
        return self.median <= self.bar if self.is_smaller_better else self.median >= self.bar

    def shown(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{value:,.{0 if value >= 100 else 2}f} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        """Return everything, with the median."""
        return asdict(self) | {"median": self.median, "is_met": self.is_met}


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
