"""Every method with every sampler; samplers that fail; proposals as recorded inputs."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.search import (
    Create,
    Exited,
    ExitReason,
    Observation,
    Proposal,
    Proposed,
    Reported,
    Sampler,
    SearchConfig,
    Shutdown,
    Space,
    SpaceError,
    Started,
    parse_space,
)
from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig
from paceline.search._grid_random_single import RandomConfig, SingleConfig
from paceline.search._preview_and_simulation import simulate
from paceline.search._sampler_program import SamplerProgram
from paceline.search._samplers import (
    SamplerError,
    SamplerSpec,
    answers,
    asking,
    check_installed,
    make_sampler,
)
from paceline.search._search import Search, replay

SPACE: dict[str, Any] = {
    "net": {"width": {"type": "int", "minval": 1, "maxval": 9, "count": 3}, "depth": 2},
    "lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1, "count": 2},
    "act": {"type": "categorical", "vals": [True, 1, "relu"]},
}
HALVING: dict[str, Any] = {
    "metric": "loss", "max_trials": 9, "max_time": 8, "time_metric": "batches",
    "max_concurrent_trials": 3,
}  # fmt: skip
METHODS: list[SearchConfig] = [
    SingleConfig(metric="loss"),
    RandomConfig(metric="loss", max_trials=9, max_concurrent_trials=2),
    AsyncHalvingConfig(num_rungs=3, **HALVING),
    AdaptiveAshaConfig(smaller_is_better=False, **HALVING),
]


class Faulty(Sampler):
    """Proposes from the space in every second answer only."""

    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Any
    ) -> Sequence[Proposal]:
        if len(observations) % 2:
            return [Proposal(hparams={"lr": 7.0})] * n
        return [Proposal(hparams=space.decode(rng.random(len(space.parameters))))] * n


def samplers() -> dict[str, Callable[[], Sampler]]:
    made: dict[str, Callable[[], Sampler]] = {
        "grid": lambda: make_sampler("grid", {}, 1),
        "sobol": lambda: make_sampler("sobol", {}, 1),
        "tpe": lambda: make_sampler("tpe", {}, 1),
        "faulty": Faulty,
    }
    for of in ("tpe", "cmaes", "nsgaii"):
        made[of] = lambda of=of: make_sampler("optuna", {"of": of}, 1)  # type: ignore[misc]
    return made


def metric_of(create: Create, time: int) -> float:
    """Return a value that is NaN for a part of the space."""
    width = create.hparams["net"]["width"]
    return math.nan if width == 9 else (math.log10(create.hparams["lr"]) + 3) ** 2 + width / time


def exit_of(create: Create, time: int) -> ExitReason | None:
    width = create.hparams["net"]["width"]
    reasons = {2: ExitReason.ERROR, 3: ExitReason.CANCELED}
    return reasons.get(width)


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.kind)
@pytest.mark.parametrize("name", samplers())
def test_a_search_keeps_its_rules_with_any_sampler(config: SearchConfig, name: str) -> None:
    sampler = samplers()[name]()
    result = simulate(config, SPACE, 3, metric_of, exit_of=exit_of, sampler=sampler)
    assert len(result.trained) == config.num_planned(parse_space(SPACE))
    assert isinstance(result.operations[-1][-1], Shutdown)
    created = [one for group in result.operations for one in group if isinstance(one, Create)]
    space = parse_space(SPACE)
    assert [space.check(create.hparams) for create in created] == [c.hparams for c in created]
    fallbacks = [one for one in result.inputs if isinstance(one, Proposed) and one.is_fallback]
    assert len(fallbacks) == (len(created) // 2 if name == "faulty" else 0)
    # The stored answers are enough: nobody is asked again.
    stored = [list(group) for group in result.operations]
    assert replay(config, SPACE, 3, result.inputs, is_asking=True) == stored
    search = Search(config, SPACE, 3, is_asking=True)
    for given, expected in zip(result.inputs, stored, strict=True):
        text = json.dumps(search.snapshot(), allow_nan=False)
        search = Search.restore(config, SPACE, json.loads(text))
        assert json.dumps(search.snapshot(), allow_nan=False) == text
        assert search.apply(given) == expected
    assert search.is_over


def test_a_sampler_is_told_of_trials_and_gets_its_notes_back() -> None:
    search = Search(
        AdaptiveAshaConfig(**HALVING | {"max_concurrent_trials": 4}), SPACE, 3, is_asking=True
    )
    search.apply(Started())
    for _ in range(4):
        [answer] = answers(
            search,
            lambda seen, n: [
                Proposal(hparams=search.space.decode([0.5] * 3), note={"n": len(seen)})
            ],
            "mine",
        )
        assert answer.by == "mine"
        search.apply(answer)
        assert search.apply(answer) == [], "a second answer changes nothing"
    ids = [seen.id for seen in search.observations()]
    search.apply(Reported(request_id=ids[0], time=2, metric=math.nan))
    search.apply(Reported(request_id=ids[1], time=8, metric=0.5))
    search.apply(Exited(request_id=ids[2], reason=ExitReason.INVALID_HP))
    search.apply(Exited(request_id=ids[3], reason=ExitReason.ERROR))
    told = [(seen.state, seen.loss, seen.time, seen.note) for seen in search.observations()]
    assert told == [
        ("stopped", None, 2.0, {"n": 0}),
        ("completed", 0.5, 8.0, {"n": 1}),
        ("invalid", None, 0.0, {"n": 2}),
        ("failed", None, 0.0, {"n": 3}),
    ]


def test_points_come_first_and_the_rest_of_them_is_drawn() -> None:
    search = Search(RandomConfig(metric="loss", max_trials=4), SPACE, 3, is_asking=True)
    drawn = Search(RandomConfig(metric="loss", max_trials=4), SPACE, 3).apply(Started())
    search.apply(Started())
    points = [{"lr": 0.001}, {"net": {"width": 99}}]
    found = answers(search, None, "random", points, most=9)
    assert [(one.by, one.is_fallback) for one in found] == [
        ("points_to_evaluate", False), ("random", True), ("random", False), ("random", False),
    ]  # fmt: skip
    created = [search.apply(one)[0] for one in found]
    own = [one for one in drawn if isinstance(one, Create)]
    assert created[0].hparams == own[0].hparams | {"lr": 0.001}  # type: ignore[union-attr]
    # Draws are those of a search without a sampler.
    assert created[1:] == own[1:]


@pytest.mark.parametrize(
    "given",
    [
        [], ["x"], [{"hparams": 3}], [{"hparams": {"lr": math.nan}}], None,
        [Proposal(hparams={}, note="x" * 70_000)], [Proposal(hparams={}, note=math.nan)],
    ],
    ids=repr,
)  # fmt: skip
def test_any_nonsense_falls_back_to_the_draw(given: Any) -> None:
    search = Search(SingleConfig(metric="loss"), {"c": 1}, 3, is_asking=True)
    search.apply(Started())
    [answer] = answers(search, lambda seen, n: given, "mine")
    assert (answer.hparams, answer.by, answer.is_fallback) == (None, "random", True)
    assert "mine" in answer.why


def test_a_proposal_outside_the_space_is_refused() -> None:
    search = Search(SingleConfig(metric="loss"), SPACE, 3, is_asking=True)
    search.apply(Started())
    wrong = Proposed(request_id=search.asks[0].request_id, hparams={"lr": 3}, by="")
    with pytest.raises(SpaceError, match="must be"):
        search.apply(wrong)
    assert len(search.asks) == 1


def test_shares_lead_to_values_and_back() -> None:
    space = parse_space(SPACE)
    assert [(each.name, each.kind, each.log) for each in space.parameters] == [
        ("act", "categorical", False), ("lr", "double", True), ("net.width", "int", False),
    ]  # fmt: skip
    for shares in ([0, 0, 0], [1, 1, 1], [0.4, 0.3, 0.5]):
        hparams = space.decode(shares)
        assert space.check(hparams) == hparams
        again = space.decode(space.encode(hparams))
        assert again["lr"] == pytest.approx(hparams["lr"])
        assert (again["net"], again["act"]) == (hparams["net"], hparams["act"])
    assert space.decode([0.5, 0, 0])["act"] is not True
    with pytest.raises(ValueError, match="3 numbers from 0 to 1"):
        space.decode([0.5])
    with pytest.raises(SpaceError, match="`act` must be one of"):
        space.check({"act": 1.0, "lr": 0.01, "net": {"width": 3}})


LAB = """
import os, time
from paceline.search import Proposal, Sampler

class Lab(Sampler):
    def __init__(self, fault=""):
        self.fault = fault

    def ask(self, space, observations, n, rng):
        print("no answer")
        if not observations:
            if self.fault == "raise":
                raise ValueError("out of ideas")
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "kill":
                os.kill(os.getpid(), 9)
        return [Proposal(hparams=space.decode([0.5] * 3), why=str(os.getpid()))] * n
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SamplerProgram]]:
    (tmp_path / "lab_sampler.py").write_text(LAB)
    info = tmp_path / "lab-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1\n")
    names = "lab = lab_sampler:Lab\nno_sampler = os:system\n"
    (info / "entry_points.txt").write_text(f"[paceline.samplers]\n{names}")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    made = []

    def make(name: str = "lab_sampler:Lab", timeout: float = 120, **options: Any) -> SamplerProgram:
        spec = SamplerSpec(name=name, options=options, timeout_s=timeout)
        made.append(SamplerProgram(spec, SPACE, 1))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", "out of ideas"),
        ("kill", "its process has ended"),
        ("hang", "did not answer within 5 s"),
    ],
)
def test_a_sampler_that_fails_is_replaced_and_asked_again(
    lab: Callable[..., SamplerProgram], fault: str, why: str
) -> None:
    program = lab(fault=fault, timeout=5 if fault == "hang" else 120)
    search = Search(RandomConfig(metric="loss", max_trials=2), SPACE, 3, is_asking=True)
    search.apply(Started())
    [first] = answers(search, program, "lab")
    assert first.is_fallback
    assert why in first.why
    search.apply(first)
    program._timeout_s = 120
    [second] = answers(search, program, "lab")
    assert (second.by, second.is_fallback) == ("lab", False)


def test_the_process_of_a_sampler_ends_with_its_user(lab: Callable[..., SamplerProgram]) -> None:
    program = lab()
    pid = int(program([], 1)[0]["why"])  # type: ignore[index]
    os.kill(pid, 0)
    program.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)


def test_only_samplers_are_called(lab: Callable[..., SamplerProgram]) -> None:
    with pytest.raises(RuntimeError, match=r"must be a subclass of `paceline\.search\.Sampler`"):
        lab("no_sampler")([], 1)


@pytest.mark.parametrize("name", ["os:popen", "paceline.search._samplers:GridSampler", "unknown"])
def test_a_class_that_no_package_names_as_a_sampler_is_not_imported(
    lab: Callable[..., SamplerProgram], name: str
) -> None:
    with pytest.raises(SamplerError, match=f"`{name}` must be named by an entry point"):
        lab(name)([], 1)


def test_the_same_search_asks_with_the_same_random_numbers() -> None:
    ask = asking(Faulty(), parse_space(SPACE), 5)
    assert ask([], 1) == ask([], 1)


def test_a_module_of_the_working_directory_is_taken_only_where_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write to the working directory of a master."""
    mark = tmp_path / "imported"
    for name in ("lab_sampler", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n{LAB}")
    monkeypatch.chdir(tmp_path)
    spec = SamplerSpec(name="lab_sampler:Lab", options={"fault": ""}, timeout_s=120)
    program = SamplerProgram(spec, SPACE, 1)
    with pytest.raises(SamplerError, match="`lab_sampler:Lab` must be named by an entry point"):
        program([], 1)
    program.close()
    assert not mark.exists()
    (tmp_path / "msgspec.py").unlink()
    program = SamplerProgram(spec, SPACE, 1, directory=str(tmp_path))
    assert len(program([], 1)) == 1
    program.close()
    assert mark.exists()


@pytest.mark.parametrize("is_told_on_the_way", [True, False])
def test_optuna_has_each_trial_once_with_its_outcome(is_told_on_the_way: bool) -> None:
    """Trials are those that it has proposed, unless another process has: then they are added."""
    pytest.importorskip("optuna")
    from paceline.search._optuna_sampler import OptunaSampler

    space, rng = parse_space(SPACE), None
    sampler = OptunaSampler(seed=1)
    ended: list[Observation] = []
    outcomes = [
        ("completed", 0.5), ("stopped", 0.7), ("failed", None), ("invalid", None),
        ("out_of_memory", 0.1), ("stopped", None),
    ]  # fmt: skip
    for number, (state, loss) in enumerate(outcomes):
        [proposal] = sampler.ask(space, ended, 1, rng)  # type: ignore[arg-type]
        seen = Observation(
            id=str(number), hparams=space.check(proposal.hparams), state="running", loss=None,
            time=0, note=proposal.note,
        )  # fmt: skip
        if is_told_on_the_way:
            sampler.ask(space, [*ended, seen], 1, rng)  # type: ignore[arg-type]
        ended.append(msgspec.structs.replace(seen, state=state, loss=loss, time=4))
    if not is_told_on_the_way:
        sampler = OptunaSampler(seed=2)
    sampler.ask(space, ended, 0, rng)  # type: ignore[arg-type]
    proposed = [space.check(seen.hparams)["lr"] for seen in ended]
    trials = {each.params["lr"]: each for each in sampler._study.trials}
    known = [trials[lr] for lr in proposed]
    assert [(each.state.name, each.value) for each in known] == [
        ("COMPLETE", 0.5), ("PRUNED", 0.7), ("FAIL", None), ("COMPLETE", math.inf),
        ("COMPLETE", math.inf), ("COMPLETE", math.inf),
    ]  # fmt: skip
    assert [each.system_attrs.get("constraints") for each in known] == [
        (0.0,), (0.0,), None, (0.0,), (1.0,), (0.0,),
    ]  # fmt: skip
    # With the first trial that ran out of memory it began anew, without what nobody had tried.
    assert len(sampler._study.trials) == (7 if is_told_on_the_way else 6)


@pytest.mark.parametrize("of", ["tpe", "nsgaii"])
def test_a_sampler_that_is_made_anew_repeats_no_point(of: str) -> None:
    """A restart of the master, or the first trial out of memory, must not repeat the beginning."""
    pytest.importorskip("optuna")
    from paceline.search._optuna_sampler import OptunaSampler

    space, rng = parse_space(SPACE), None
    sampler = OptunaSampler(of, seed=1)
    ended: list[Observation] = []
    for number in range(9):
        if number == 3:
            sampler = OptunaSampler(of, seed=1)
        [proposal] = sampler.ask(space, ended, 1, rng)  # type: ignore[arg-type]
        state = "out_of_memory" if number == 5 else "completed"
        hparams = space.check(proposal.hparams)
        ended.append(Observation(id=str(number), hparams=hparams, state=state, loss=0.5, time=1))
    assert len({seen.hparams["lr"] for seen in ended}) == 9, f"must differ: {ended}"


def test_a_sampler_whose_package_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.search._samplers.find_spec", lambda package: None)
    check_installed(SamplerSpec(name="sobol"))
    with pytest.raises(ImportError, match=r"needs the package `optuna`.*paceline\[optuna\]"):
        check_installed(SamplerSpec(name="optuna", options={"of": "tpe"}))
