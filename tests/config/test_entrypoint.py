import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ConfigError, Problem, fill_entrypoint, validate_config

Make = Callable[..., dict[str, Any]]
Collect = Callable[[dict[str, Any]], dict[str, Problem]]

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
    "entrypoint", ["python3 train.py", "./run:this now", ["python3", ""], "module:Class --arg"]
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
        ("model_def:MNistTrial", "entrypoint", "`module:Class` is not offered yet"),
        ("pkg.model:T1\n", "entrypoint", "`module:Class` is not offered yet"),
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
        (["python3", "a b.py"], "a b"),
        ("./run.sh", "experiment"),
        ("python3 'unclosed.py", "experiment"),
    ],
)
def test_an_experiment_without_a_name_is_named_after_its_script(
    make: Make, entrypoint: str | list[str], name: str
) -> None:
    space = {"lr": 1}
    assert validate_config(make(entrypoint=entrypoint, hyperparameters=space)).name == name
    assert validate_config(make(entrypoint=entrypoint, hyperparameters=space, name="n")).name == "n"
