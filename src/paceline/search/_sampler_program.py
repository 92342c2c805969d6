"""Samplers in a process of their own: it may hang, be killed or load what it likes."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline._base.request_program import RequestProgram
from paceline.search._hyperparameter_space import parse_space
from paceline.search._samplers import (
    IN_PROCESS,
    Ask,
    Observation,
    Proposal,
    SamplerError,
    SamplerSpec,
    asking,
    make_sampler,
)


class SamplerProgram:
    """Sampler in a process, which starts with the first question and again after it has failed.

    A sampler that needs nothing but NumPy works in the process of its user instead.

    Args:
        spec: The sampler.
        hyperparameters: The space in these words.
        seed: The seed of the search.
        directory: Where any class is looked for before the installed packages. By default nowhere,
            and only a sampler that an entry point names is taken.
    """

    def __init__(
        self,
        spec: SamplerSpec,
        hyperparameters: dict[str, Any],
        seed: int,
        directory: str | None = None,
    ) -> None:
        self._timeout_s = spec.timeout_s
        self._setup: dict[str, Any] = {
            "name": spec.name,
            "options": spec.options,
            "hyperparameters": hyperparameters,
            "seed": seed,
            "takes_places": directory is not None,
        }
        self._ask = _ask(**self._setup) if spec.name in IN_PROCESS else None
        # A module of its own: as the main one it would be a second one beside its first import.
        command = [sys.executable, "-m", __name__]
        self._program = RequestProgram(
            f"sampler {spec.name}", command, SamplerError, directory or "/"
        )

    def __call__(self, observations: Sequence[Observation], n: int) -> Sequence[Proposal]:
        """Return the sampler's proposals.

        Raises:
            SamplerError: It has failed or ended, or takes too long.
        """
        if self._ask is not None:
            return self._ask(observations, n)
        seen = msgspec.to_builtins(observations)
        request = {"setup": self._setup, "observations": seen, "n": n}
        proposals: list[Proposal] = self._program.ask("ask", timeout_s=self._timeout_s, **request)
        return proposals

    def close(self) -> None:
        """End the process."""
        self._program.close()


def _main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # What a sampler prints is no answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines.put,), daemon=True).start()
    ask: Ask | None = None
    while True:
        request = json.loads(lines.get())
        try:
            ask = ask or _ask(**request["setup"])
            observations = msgspec.convert(request["observations"], list[Observation])
            answer: dict[str, Any] = {"value": list(ask(observations, request["n"]))}
            text = msgspec.json.encode(answer, enc_hook=_plain)
        except Exception as error:
            ask = None
            text = msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})
        answers.write(text.decode() + "\n")
        answers.flush()


def _read(put: Callable[[str], None]) -> None:
    for line in sys.stdin:
        put(line)
    # The other side has ended, maybe while the sampler works or hangs.
    os._exit(0)


def _ask(
    name: str,
    options: dict[str, Any],
    hyperparameters: dict[str, Any],
    seed: int,
    takes_places: bool,
) -> Ask:
    sampler = make_sampler(name, options, seed, takes_places=takes_places)
    return asking(sampler, parse_space(hyperparameters), seed)


def _plain(value: Any) -> Any:
    # Numbers of NumPy.
    return value.item()


if __name__ == "__main__":
    _main()
