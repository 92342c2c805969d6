"""What an experiment came from and what came of it: proposals, changed code, repeats."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paceline.client import _late_models as models
from paceline.client._http_session import HttpSession, checked_key

ROLES = ("repeat", "baseline")
"""What the labels of repeats begin with; the number of the repeated trial follows."""
# Student's t for 95 % of both sides, by degrees of freedom from 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
      2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
      2.052, 2.048, 2.045, 2.042)  # fmt: skip
_MANY_T = 2.0


def upload_code(session: HttpSession, directory: str | Path | None) -> dict[str, Any]:
    """Send a directory, and return the fields by which a request names the code.

    Raises:
        ContextError: It cannot be sent.
    """
    if directory is None:
        return {}
    from paceline.client._code_and_run_uploads import pack_context
    from paceline.core._process_environment import describe_source

    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        digest = pack_context(Path(directory), file)
        file.flush()
        session.send("PUT", f"contexts/{digest}", content=Path(file.name))
    source = describe_source(Path(directory))
    return {"context_digest": digest, "source": None if source is None else models.Source(**source)}


class Lineage:
    """Part of an experiment: proposals, its tree and its changes."""

    _session: HttpSession
    data: "models.Experiment"

    def propose(
        self, hparams: Mapping[str, Any], *, why: str = "", by: str = "", key: str | None = None
    ) -> "models.Proposal":
        """Propose hyperparameters for the next trial of the search.

        Args:
            hparams: Hyperparameters, nested as in the configuration; the rest come from a draw.
            why: The reason, for people.
            by: Who proposes; by default the user of the token.
            key: A key of your own: a call that is repeated with it within a day adds nothing.

        Raises:
            ApiError: The search has ended or makes no more trials, or has no such hyperparameters.
        """

        body = models.NewProposal(hparams=dict(hparams), why=why, by=by)
        path = f"experiments/{self.data.id}/proposals"
        return self._session.call("POST", path, models.Proposal, body=body, key=checked_key(key))

    def proposals(self) -> "list[models.Proposal]":
        """Return the proposals for the search, and the trials that were made of them."""

        return self._session.get(f"experiments/{self.data.id}/proposals", list[models.Proposal])

    def asks(self, wait_s: float = 30.0) -> "models.SearchAsks":
        """Return what the search asks, and what a sampler is told; for `sampler: external`.

        Args:
            wait_s: How long to wait for an ask, in seconds, from 0 to 50.
        """
        path = f"experiments/{self.data.id}/asks"
        return self._session.get(path, models.SearchAsks, wait=wait_s)

    def answer(
        self, ask: "models.SearchAsk", hparams: Mapping[str, Any], *, why: str = "", by: str = ""
    ) -> None:
        """Give a trial that waits its hyperparameters.

        Args:
            ask: One of `asks`.
            hparams: As for `propose`; those left out are those of the ask.
            why: The reason, for people.
            by: Who answers; by default the user of the token.

        Raises:
            ApiError: It was answered before or was too late (`ask_answered`), the search has ended,
                or it has no such hyperparameters.
        """
        body = models.NewProposal(hparams=dict(hparams), why=why, by=by)
        path = f"experiments/{self.data.id}/asks/{ask.id}"
        self._session.send("POST", path, body=body)

    def tree(self) -> "list[models.Relative]":
        """Return what it came from and all that came of that, parents before children."""

        return self._session.get(f"experiments/{self.data.id}/tree", list[models.Relative])

    def diff(self, since: int | None = None) -> "models.CodeDiff":
        """Return how its code differs from that of the experiment that it came from.

        Args:
            since: Another experiment to compare with.

        Raises:
            ApiError: It came from none, or an experiment or its code is gone.
        """

        return self._session.get(f"experiments/{self.data.id}/diff", models.CodeDiff, since=since)


@dataclass(frozen=True, slots=True)
class Arm:
    """Repeats of a trial: the best values of the searched metric by seed."""

    trial: int
    experiment: int
    values: Mapping[int, float | None]
    has_completed: bool

    def measured(self) -> dict[int, float]:
        """Return the finite values."""
        return {k: v for k, v in self.values.items() if v is not None and math.isfinite(v)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """What repeats of a trial with other seeds say.

    Attributes:
        trial: The trial that was repeated.
        experiments: The experiments with the repeats, that of the baseline last.
        num_repeats: How many repeats have a value.
        num_missing: How many have none, as they failed or have not got that far.
        mean: The mean of the metric over the repeats; None with none.
        deviation: Its standard deviation, the noise; None with fewer than two.
        baseline: The trial that it was compared with; None for none.
        num_pairs: How many seeds both have a value for.
        gain: How much better the trial is than the baseline in the mean of these pairs, above 0
            in either direction of the metric; None with fewer than two pairs.
        interval: Where the gain lies with a probability of 95 %, by Student's t of the pairs.
        gain_over_noise: The gain in standard deviations of the pairs; None if these are all alike.
        is_real: Whether the whole interval is above 0; None if it cannot be told yet.
    """

    trial: int
    experiments: tuple[int, ...]
    num_repeats: int
    num_missing: int
    mean: float | None
    deviation: float | None
    baseline: int | None
    num_pairs: int
    gain: float | None
    interval: tuple[float, float] | None
    gain_over_noise: float | None
    is_real: bool | None


def compared(repeats: Arm, baseline: Arm | None, searched: "models.Experiment") -> Repeats:
    """Return what repeats say, alone or against those of a baseline with the same seeds."""
    found, other = repeats.measured(), {} if baseline is None else baseline.measured()
    arms = [repeats] if baseline is None else [repeats, baseline]
    sign = 1 if searched.smaller_is_better else -1
    gains = [sign * (other[seed] - found[seed]) for seed in sorted(found.keys() & other.keys())]
    gain = interval = ratio = is_real = None
    if len(gains) > 1:
        gain, noise = fmean(gains), stdev(gains)
        half = (_T[len(gains) - 2] if len(gains) - 2 < len(_T) else _MANY_T) * noise
        half /= math.sqrt(len(gains))
        interval = (gain - half, gain + half)
        ratio = gain / noise if noise > 0 else None
        # Pairs that are missing may be the ones that failed: nothing is said without them.
        is_complete = all(
            arm.has_completed and len(arm.measured()) == len(arm.values) for arm in arms
        )
        is_real = interval[0] > 0 if is_complete else None
    return Repeats(
        trial=repeats.trial,
        experiments=tuple(arm.experiment for arm in arms),
        num_repeats=len(found),
        num_missing=sum(len(arm.values) - len(arm.measured()) for arm in arms),
        mean=fmean(found.values()) if found else None,
        deviation=stdev(found.values()) if len(found) > 1 else None,
        baseline=None if baseline is None else baseline.trial,
        num_pairs=len(gains),
        gain=gain,
        interval=interval,
        gain_over_noise=ratio,
        is_real=is_real,
    )


def repeated_config(
    searched: "models.Experiment", hparams: Mapping[str, Any], label: str, seeds: int, seed: int
) -> dict[str, Any]:
    """Return the config of an experiment whose trials all have some hyperparameters.

    Constants draw nothing, so trials of the same place have the same seed in every experiment of
    the same `seed`: this is what makes pairs of them.
    """
    before = searched.config["searcher"]
    names = ["metric", "smaller_is_better", "stop_timeout", "max_concurrent_trials"]
    method: dict[str, Any] = {"name": "random"}
    if before.get("time_metric") is not None:
        # Only a search with reports ends trials that train on for ever.
        method = {"name": "async_halving", "num_rungs": 1}
        names += ["time_metric", "max_time"]
    else:
        names += ["max_length"]
    kept = {name: before[name] for name in names if before.get(name) is not None}
    others = [one for one in searched.config["labels"] if one.partition(":")[0] not in ROLES]
    return {
        **searched.config,
        "name": f"{searched.name} ({label.replace(':', ' of trial ')})",
        "labels": [*others, label],
        "searcher": method | kept | {"max_trials": seeds},
        "hyperparameters": _as_constants(hparams),
        "reproducibility": searched.config["reproducibility"] | {"experiment_seed": seed},
    }


def _as_constants(hparams: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _as_constants(value)
        if isinstance(value, dict) and "type" not in value
        else {"type": "const", "val": value}
        for name, value in hparams.items()
    }
