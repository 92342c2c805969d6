"""Numbers in the text form that Prometheus reads, version 0.0.4."""

from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusText:
    """Collect metrics; those of one name are added in one call."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, what: str, value: float | None, **labels: str) -> None:
        """Add a number that rises and falls; None if it is not known."""
        if value is not None:
            self.series(name, what, "gauge", [(labels, value)])

    def counter(self, name: str, what: str, value: float) -> None:
        """Add a number that only rises."""
        self.series(name, what, "counter", [({}, value)])

    def series(
        self,
        name: str,
        what: str,
        kind: str,
        values: Iterable[tuple[Mapping[str, str], float]],
    ) -> None:
        """Add numbers that differ by labels."""
        self._head(name, what, kind)
        self._lines += [_line(name, labels, value) for labels, value in values]

    def histogram(
        self,
        name: str,
        what: str,
        bounds: tuple[float, ...],
        values: Iterable[tuple[Mapping[str, str], float, list[int]]],
    ) -> None:
        """Add histograms: labels, the sum, and the numbers up to each bound and in all."""
        self._head(name, what, "histogram")
        for labels, total, cumulative in values:
            for bound, number in zip([*map(str, bounds), "+Inf"], cumulative, strict=True):
                self._lines.append(_line(f"{name}_bucket", {**labels, "le": bound}, number))
            self._lines.append(_line(f"{name}_sum", labels, total))
            self._lines.append(_line(f"{name}_count", labels, cumulative[-1]))

    def text(self) -> str:
        """Return all of it."""
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, what: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
