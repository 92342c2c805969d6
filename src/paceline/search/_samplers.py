"""Samplers: where the hyperparameters of new trials come from, apart from the method."""

from __future__ import annotations

import csv
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.search._hyperparameter_space import Space
from paceline.search._search_messages import Create, Proposed, Recalled

if TYPE_CHECKING:
    from numpy.random import Generator

    from paceline.search._search import Search

# What Optuna itself does not install.
_NEEDS = {"gp": ("scipy",), "cmaes": ("cmaes",)}
OWN_SAMPLERS = ("random", "grid", "sobol", "tpe")
"""The samplers that are part of Paceline and take no options."""
IN_PROCESS = ("grid", "tpe")
"""Those that need nothing but NumPy, so they work in the process of the search."""

_POINTS = "points_to_evaluate"
_LONGEST_TEXT = 500
_LARGEST_NOTE = 64 * 1024


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A trial of the search so far, as samplers see it.

    Attributes:
        id: The trial, the same in every call.
        hparams: Its hyperparameters.
        state: "running", "completed", "stopped" early by the method, "failed", "out_of_memory", or
            "invalid" if it refused its hyperparameters.
        loss: The best value so far of the searched metric, negated if larger values are better;
            None without a finite one.
        time: How long it had trained at its newest report, in the method's unit; 0 before one.
        note: What the sampler has put into its `Proposal`; None for draws at random.
        is_earlier: Whether it is from before the search, by `warm_start_from`.
        losses: With several objectives, the losses of all at one report, the first of which is
            `loss`; empty without a finite one, and in searches of one objective.
    """

    id: str
    hparams: dict[str, Any]
    state: str
    loss: float | None
    time: float
    note: Any = None
    is_earlier: bool = False
    losses: tuple[float, ...] = ()


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters for a new trial.

    Attributes:
        hparams: A value of the space for each name; constants may be left out.
        by: Who proposes it; the sampler's name by default.
        why: The reason, for people.
        note: JSON of up to 64 KiB that the sampler gets back with the observation of the trial.
    """

    hparams: dict[str, Any]
    by: str = ""
    why: str = ""
    note: Any = None


class SamplerError(RuntimeError):
    """Raised when a sampler in a process of its own fails, ends or takes too long."""


class Sampler(ABC):
    """Proposes hyperparameters; subclasses override `ask`.

    It may keep what it has computed, but must work from the observations alone: after a restart
    it is made anew. It is called from one thread.
    """

    @abstractmethod
    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Generator
    ) -> Sequence[Proposal]:
        """Return `n` proposals.

        Args:
            space: The space; see `space.parameters`, `space.encode` and `space.decode`.
            observations: All trials so far, in the order of their creation.
            n: How many are wanted.
            rng: Random numbers, the same for the same search and number of observations.
        """


def num_asked(observations: Sequence[Observation]) -> int:
    """Return how many of the observations are of trials of the search."""
    return sum(not seen.is_earlier for seen in observations)


class GridSampler(Sampler):
    """Proposes the points of the grid in their order, and begins again after the last."""

    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Generator
    ) -> Sequence[Proposal]:
        """Return the next points."""
        size, first = space.grid_size(), num_asked(observations)
        return [
            Proposal(
                hparams=space.grid_point(index % size),
                why=f"point {index % size + 1} of {size}",
            )
            for index in range(first, first + n)
        ]


class SobolSampler(Sampler):
    """Proposes the points of a scrambled Sobol sequence, which fill the space evenly.

    Args:
        seed: The seed of the scrambling.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Generator
    ) -> Sequence[Proposal]:
        """Return the next points."""
        import torch

        first = num_asked(observations)
        if not space.parameters:
            return [Proposal(hparams=space.decode([])) for _ in range(n)]
        size = len(space.parameters)
        engine: Any = torch.quasirandom.SobolEngine(size, scramble=True, seed=self._seed)  # type: ignore[no-untyped-call]
        points = engine.fast_forward(first).draw(n, dtype=torch.float64).tolist()
        return [
            Proposal(hparams=space.decode(point), why=f"point {first + index + 1} of the sequence")
            for index, point in enumerate(points)
        ]


class SamplerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sampler in plain words, as a config has it.

    Attributes:
        name: "random", "grid", "sobol", "tpe", "optuna", "external", the name of an entry point, or
            "package.module:Class".
        options: The arguments of its class.
        timeout_s: How long an answer may take.
    """

    name: str = "random"
    options: dict[str, Any] = {}
    timeout_s: float = 60.0

    @property
    def shown(self) -> str:
        """Its name for people."""
        return f"optuna {self.options['of']}" if self.name == "optuna" else self.name


ENTRY_POINTS = "paceline.samplers"
"""The group of entry points: each names a sampler and refers to a `Sampler`."""


def installed_place(name: str) -> str | None:
    """Return the place of a sampler that an installed package names, by its name or place."""
    points = entry_points(group=ENTRY_POINTS)
    return next((point.value for point in points if name in (point.name, point.value)), None)


def check_installed(spec: SamplerSpec, *, takes_places: bool = False) -> None:
    """Refuse a sampler that is not installed here; nothing is imported.

    Args:
        spec: The sampler.
        takes_places: Whether any class may be named, as in a user's own process.

    Raises:
        ImportError: It is not installed; the text says what to install.
    """
    name = spec.name
    install, packages = "", []
    if name == "external":
        if takes_places:
            raise ImportError(
                "The sampler `external` must have a master, whose API hands out what it is asked."
                " Hint: without a master, `Study.propose` names hyperparameters."
            )
    elif ":" in name and takes_places:
        install = name.partition(":")[0].partition(".")[0]
        packages = [install]
    elif name not in (*OWN_SAMPLERS, "optuna") and installed_place(name) is None:
        known = ", ".join(sorted(point.name for point in entry_points(group=ENTRY_POINTS)))
        raise ImportError(
            f"The sampler `{name}` must be named by an entry point `{ENTRY_POINTS}` of a package"
            f" that is installed here, which has: {known or 'none'}. Hint: see"
            " docs/search-methods.md."
        )
    if name == "optuna":
        install = "paceline[optuna]"
        packages = ["optuna", *_NEEDS.get(spec.options["of"], ())]
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(
                f"The sampler `{name}` needs the package `{package}`, which is not installed here."
                f" Hint: pip install '{install}' into the environment of the search."
            )


def make_sampler(
    name: str, options: Mapping[str, Any], seed: int, *, takes_places: bool = False
) -> Sampler:
    """Return a sampler.

    Args:
        name: "grid", "sobol", "tpe", "optuna", a name or place of an entry point, or with
            `takes_places` the place of any class, "package.module:Class".
        options: The arguments of the class.
        seed: The seed of the search, for samplers of Paceline that need one.
        takes_places: See `check_installed`.

    Raises:
        Exception: What the import or the class raises.
    """
    if name == "grid":
        return GridSampler()
    if name == "sobol":
        return SobolSampler(seed)
    if name == "tpe":
        from paceline.search._tpe_sampler import TpeSampler

        return TpeSampler()
    if name == "optuna":
        from paceline.search._optuna_sampler import OptunaSampler

        return OptunaSampler(seed=seed, **options)
    place = installed_place(name) or (name if takes_places else None)
    if place is None:
        raise LookupError(f"`{name}` must be named by an entry point `{ENTRY_POINTS}`")
    module, _, attribute = place.partition(":")
    kind = getattr(import_module(module), attribute)
    # The name may be a stranger's: nothing else is called.
    if not (isinstance(kind, type) and issubclass(kind, Sampler)):
        raise TypeError(
            f"`{name}` must be a subclass of `paceline.search.Sampler`, but is {kind!r}"
        )
    sampler: Sampler = kind(**options)
    return sampler


Ask = Callable[[Sequence[Observation], int], Sequence[Proposal]]
"""Asks a sampler for a number of proposals; raises what the sampler raises."""


def asking(sampler: Sampler | None, space: Space, seed: int) -> Ask:
    """Return what asks a sampler in this process; None proposes nothing."""

    def ask(observations: Sequence[Observation], n: int) -> Sequence[Proposal]:
        from numpy.random import default_rng

        rng = default_rng([seed, len(observations)])
        return () if sampler is None else sampler.ask(space, observations, n, rng)

    return ask


def answers(
    search: Search, ask: Ask | None, name: str, points: Sequence[Any] = (), most: int = 1
) -> list[Proposed]:
    """Return answers to the oldest open asks of a search, which the search then takes as inputs.

    A sampler that fails, or proposes what the space does not have, is no error: the draw at
    random of the search stands in for it, and the answer says why.

    Args:
        search: The search, unchanged meanwhile.
        ask: Asks the sampler; None for draws at random.
        name: The sampler's name, for people.
        points: What the first trials are to try: of each a part of the hyperparameters.
        most: How many asks to answer at most.
    """
    return answers_to(search.space, search.asks[:most], search.observations(), ask, name, points)


def answers_to(
    space: Space,
    asks: Sequence[Create],
    observations: Sequence[Observation],
    ask: Ask | None,
    name: str,
    points: Sequence[Any] = (),
) -> list[Proposed]:
    """Return answers to asks of a search, for any thread; see `answers`."""
    number = num_asked(observations)
    first = points[number : number + len(asks)]
    found = [
        _answer(space, each, Proposal(hparams=merged(each.hparams, point)), _POINTS)
        for each, point in zip(asks, first, strict=False)
    ]
    rest = asks[len(first) :]
    if not rest:
        return found
    if ask is None:
        return found + [_drawn(each) for each in rest]
    try:
        proposals = list(ask(observations, len(rest)))
        if len(proposals) != len(rest):
            raise ValueError(f"it must return {len(rest)} proposal(s), but got {len(proposals)}")
    except Exception as error:
        fault = str(error)
        if not isinstance(error, SamplerError):
            fault = f"sampler {name}: {type(error).__name__}: {error}"
        return found + [_drawn(each, fault) for each in rest]
    return found + [
        _answer(space, each, given, name) for each, given in zip(rest, proposals, strict=True)
    ]


def recalled_from(path: str, space: Space, metric: str) -> Recalled:
    """Return ended trials from a CSV file, for `warm_start_from`.

    Its columns are named as the hyperparameters, with or without `config.` in front, and as the
    metric. Rows without a number as the metric are left out.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no text, or lacks the column of the metric.
    """
    trials = []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if metric not in (reader.fieldnames or ()):
            raise ValueError(f"{path!r} must have a column {metric!r}, but has none.")
        for row in reader:
            with suppress(ValueError, TypeError):
                value = float(row[metric])
                cells = {
                    each.path: _cell(row.get(each.name) or row.get(f"config.{each.name}"))
                    for each in space.parameters
                }
                trials.append((space.build(cells), value, 0.0))
    return Recalled(source=path, trials=[one for one in trials if math.isfinite(one[1])])


def _cell(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return text


def merged(drawn: dict[str, Any], point: Any) -> dict[str, Any]:
    """Return hyperparameters with those of a point in the place of the drawn ones."""
    if not isinstance(point, dict):
        raise TypeError(f"a point must be a map of names to values, but got {point!r}")
    return drawn | {
        name: merged(drawn[name], value) if isinstance(drawn.get(name), dict) else value
        for name, value in point.items()
    }


def _drawn(create: Create, fault: str = "") -> Proposed:
    return Proposed(
        request_id=create.request_id,
        hparams=None,
        by="random",
        why=fault[:_LONGEST_TEXT],
        is_fallback=bool(fault),
    )


def _answer(space: Space, create: Create, given: Any, name: str) -> Proposed:
    """Return a checked answer, which is the draw at random if the given one is not valid."""
    try:
        proposal = given if isinstance(given, Proposal) else msgspec.convert(given, Proposal)
        if len(json.dumps(proposal.note, allow_nan=False)) > _LARGEST_NOTE:
            raise ValueError(f"`note` must be JSON of at most {_LARGEST_NOTE} bytes")
        hparams = space.check(proposal.hparams)
    except Exception as error:
        problem = str(error).partition("\n")[0]
        return _drawn(create, f"a proposal of the sampler `{name}` is not valid: {problem}")
    return Proposed(
        request_id=create.request_id,
        hparams=hparams,
        by=str(proposal.by or name)[:_LONGEST_TEXT],
        why=str(proposal.why)[:_LONGEST_TEXT],
        note=proposal.note,
    )
