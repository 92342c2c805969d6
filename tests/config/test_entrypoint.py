import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ConfigError, validate_config
from paceline.config._entrypoint_command import build_command, fill_entrypoint
from paceline.config._fields_and_problems import Problem

Make = Callable[..., dict[str, Any]]
Collect = Callable[[dict[str, Any]], dict[str, Problem]]

SINGLE = {"name": "single", "metric": "loss", "max_length": {"epochs": 2}}
HPARAMS = {
    "lr": 1e-05,
    "n": 3,
    "opt": "two words",
    "flag": True,
    "none": None,
    "sizes": [1, 2],
    "net": {"depth": 4, "act": "relu"},
}


@pytest.mark.parametrize(
    ("entrypoint", "filled"),
    [
        ("python3 t.py --lr ${hparams.lr}", "python3 t.py --lr 1e-05"),
        ("t ${hparams.n}${hparams.n}", "t 33"),
        ("t --opt=${hparams.opt}", "t --opt='two words'"),
        ("t ${hparams.flag} ${hparams.none}", "t true null"),
        ("t ${hparams.sizes}", "t '[1, 2]'"),
        ("t ${hparams.net.depth} ${hparams.net.act}", "t 4 relu"),
        ("t ${hparams.net}", """t '{"depth": 4, "act": "relu"}'"""),
        ("t $${hparams.lr}", "t ${hparams.lr}"),
        ("t $${hparams.unknown}", "t ${hparams.unknown}"),
        ("t ${HOME} $HOME $$ ${hparams}", "t ${HOME} $HOME $$ ${hparams}"),
        (["t", "--opt=${hparams.opt}", "${HOME}"], ["t", "--opt=two words", "${HOME}"]),
        (["${hparams.n}", "$${hparams.n}"], ["3", "${hparams.n}"]),
    ],
)
def test_references_are_replaced_by_the_trials_values(
    entrypoint: str | list[str], filled: str | list[str]
) -> None:
    assert fill_entrypoint(entrypoint, hparams=HPARAMS) == filled


@pytest.mark.long
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30))
def test_a_filled_in_value_is_one_word_of_the_command(value: str) -> None:
    filled = fill_entrypoint("program -x ${hparams.a} -y", hparams={"a": value})
    assert shlex.split(filled) == ["program", "-x", value, "-y"]


def test_the_shell_sees_a_value_and_never_runs_it() -> None:
    command = fill_entrypoint("echo ${hparams.a}", hparams={"a": "$(echo run); `id`"})
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "$(echo run); `id`\n"


@pytest.mark.parametrize(
    ("name", "path"), [("lrr", "entrypoint"), ("net.width", "entrypoint"), ("", "entrypoint")]
)
def test_a_name_that_the_trial_lacks_is_refused_with_the_known_ones(name: str, path: str) -> None:
    with pytest.raises(ConfigError, match=f"`hparams.{name}`") as caught:
        fill_entrypoint(f"t ${{hparams.{name}}}", hparams=HPARAMS)
    [problem] = caught.value.problems
    assert problem.path == path
    assert problem.allowed == "flag, lr, n, net.act, net.depth, none, opt, sizes"


def test_a_wrong_name_in_a_list_is_found_at_its_position() -> None:
    with pytest.raises(ConfigError, match=r"`entrypoint\[1\]` refers to `hparams.x`"):
        fill_entrypoint(["t", "${hparams.x}"], hparams={})


@pytest.mark.parametrize(
    "reference",
    ["lr", "net.depth", "net", "const.a", "choice.a", "net.empty", "const"],
)
def test_a_reference_into_the_space_is_accepted_at_validation(make: Make, reference: str) -> None:
    space = {
        "lr": {"type": "double", "minval": 0, "maxval": 1},
        "net": {"depth": 3, "empty": {}},
        "const": {"type": "const", "val": {"a": 1}},
        "choice": {"type": "categorical", "vals": [{"a": 1}, {"a": 2}]},
    }
    entrypoint = f"t ${{hparams.{reference}}}"
    config = validate_config(make(hyperparameters=space, entrypoint=entrypoint))
    assert config.entrypoint == entrypoint


@pytest.mark.parametrize("reference", ["lr.minval", "choice.a", "net.depth.x", "other", "const.b"])
def test_a_reference_that_a_trial_could_lack_is_refused_at_validation(
    make: Make, problems_of: Collect, reference: str
) -> None:
    space = {
        "lr": {"type": "double", "minval": 0, "maxval": 1},
        "net": {"depth": 3},
        "const": {"type": "const", "val": {"a": 1}},
        "choice": {"type": "categorical", "vals": [{"a": 1}, {"b": 2}]},
    }
    problems = problems_of(
        make(hyperparameters=space, entrypoint=["t", f"${{hparams.{reference}}}"])
    )
    assert list(problems) == ["entrypoint[1]"]
    assert problems["entrypoint[1]"].allowed == "choice, const, lr, net.depth"


@pytest.mark.parametrize(
    "entrypoint",
    ["python3 train.py", "./run:this now", ["python3", ""], "module:Class --arg", "a..b:C", "1:a"],
)
def test_commands_are_accepted_as_they_are(make: Make, entrypoint: str | list[str]) -> None:
    assert validate_config(make(entrypoint=entrypoint)).entrypoint == entrypoint


@pytest.mark.parametrize(
    ("entrypoint", "path", "message"),
    [
        ("", "entrypoint", "must not be blank"),
        ("  \n", "entrypoint", "must not be blank"),
        ([], "entrypoint", "must name a program first"),
        ([" ", "x"], "entrypoint", "must name a program first"),
        (["python3", 3], "entrypoint[1]", "must be a string"),
        (3, "entrypoint", "must be a command"),
        ({"a": 1}, "entrypoint", "must be a command"),
        ("model_def:MNistTrial", "entrypoint", "needs a searcher that tells how long to train"),
        (None, "entrypoint", "is required"),
    ],
)
def test_what_is_no_command_is_refused(
    make: Make, problems_of: Collect, entrypoint: object, path: str, message: str
) -> None:
    problems = problems_of(make(entrypoint=entrypoint))
    assert message in problems[path].message


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        ("python3 train.py --lr ${hparams.lr}", "train"),
        ("python3 -m paceline.launch.torch_distributed python3 src/fit.py", "fit"),
        ("python3 -m paceline.launch.torch_distributed -m pkg.fit --x", "fit"),
        ("srun python3 -m paceline.declarative runs/wide.yaml num_epochs=3", "wide"),
        ("python3 -m paceline.declarative", "declarative"),
        ("python3 -m pkg.fit config.yaml", "fit"),
        (["python3", "a b.py"], "a b"),
        ("pkg.model_def:MNistTrial", "MNistTrial"),
        ("./run.sh", "experiment"),
        ("python3 'unclosed.py", "experiment"),
    ],
)
def test_an_experiment_without_a_name_is_named_after_its_script(
    make: Make, entrypoint: str | list[str], name: str
) -> None:
    fields = {"entrypoint": entrypoint, "hyperparameters": {"lr": 1}, "searcher": SINGLE}
    assert validate_config(make(**fields)).name == name
    assert validate_config(make(**fields, name="n")).name == "n"


@pytest.mark.parametrize("name", ["model_def:MNistTrial", "pkg.model:T1", "modèle:Essai_2"])
def test_a_trial_class_is_run_by_a_program_and_on_several_slots_by_the_launcher(
    make: Make, name: str
) -> None:
    config = validate_config(make(entrypoint=f" {name}\n", searcher=SINGLE))
    assert config.entrypoint == f" {name}\n"
    program = ["-m", "paceline.pytorch.run_trial", name]
    launcher = ["-m", "paceline.launch.torch_distributed"]
    for num_slots, expected in [(1, program), (2, [*launcher, *program])]:
        command = build_command(
            config.entrypoint, hparams={}, python="/venv/python", num_slots=num_slots
        )
        assert command == ["/venv/python", *expected]


@pytest.mark.parametrize(
    ("entrypoint", "command"),
    [
        ("python3 t.py --lr ${hparams.lr}", "python3 t.py --lr 1e-05"),
        (["t", "${hparams.n}"], ["t", "3"]),
        (["model_def:Trial"], ["model_def:Trial"]),
    ],
)
def test_a_command_is_run_as_it_is_on_any_number_of_slots(
    entrypoint: str | list[str], command: str | list[str]
) -> None:
    assert build_command(entrypoint, hparams=HPARAMS, python="p", num_slots=2) == command


@pytest.mark.parametrize(
    ("time", "is_accepted"),
    [
        ({"max_length": {"records": 8}}, True),
        ({"time_metric": "epochs", "max_time": 8}, True),
        ({"time_metric": "tokens", "max_time": 8}, False),
    ],
)
def test_a_trial_class_needs_a_length_in_a_unit_of_the_trainer(
    make: Make, problems_of: Collect, time: dict[str, Any], is_accepted: bool
) -> None:
    searcher = {"name": "adaptive_asha", "metric": "loss", "max_trials": 2, **time}
    data = make(entrypoint="model_def:Trial", searcher=searcher)
    if is_accepted:
        assert validate_config(data).searcher.length == 8
    else:
        assert list(problems_of(data)) == ["entrypoint"]
