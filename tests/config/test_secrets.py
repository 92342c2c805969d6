"""Secrets in a config: what is hidden, and where hidden values come from."""

from typing import Any

import pytest

from paceline.config import ConfigError, load_config, validate_config
from paceline.config._environment_and_secrets import (
    hide_in_text,
    hide_secrets,
    is_secret,
    reveal_secrets,
    without_secrets,
)
from paceline.config._validate_config import merge_configs

SEARCHER = {"name": "single", "metric": "loss"}


def config(**environment: Any) -> dict[str, Any]:
    return {"entrypoint": "true", "searcher": SEARCHER, "environment": environment}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "x", True),
        ("WANDB_API_KEY", "x", True),
        ("api_key", "x", True),
        ("MYPASSWORD", "x", True),
        ("DB_PWD", "x", True),
        ("CLIENT_SECRET_2", "x", True),
        ("DATABASE_URL", "postgres://me:pw@host/db", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("PWD", "/home", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MAX_TOKENS", "512", False),
        ("KEYBOARD", "de", False),
        ("MONKEY", "x", False),
        ("URL", "https://host/a:b@c", False),
    ],
)
def test_a_variable_looks_like_a_secret_by_its_name_or_as_a_url(
    name: str, value: str, expected: bool
) -> None:
    assert is_secret(name, value) is expected


def test_secrets_are_hidden_and_all_else_is_shown() -> None:
    given = config(
        variables=["HF_TOKEN=abc", "PLAIN=abc"], secrets={"WHATEVER": "abc"}, python="python3"
    )
    assert hide_secrets(given)["environment"] == {
        "variables": ["HF_TOKEN=***", "PLAIN=abc"], "secrets": {"WHATEVER": "***"},
        "python": "python3",
    }  # fmt: skip
    assert given["environment"]["secrets"] == {"WHATEVER": "abc"}
    resolved = validate_config(given).to_json()
    assert without_secrets(resolved)["environment"]["secrets"] == {"WHATEVER": "***"}
    assert without_secrets(resolved)["environment"]["variables"]["HF_TOKEN"] == "abc"
    assert "abc" not in repr(validate_config(config(secrets={"WHATEVER": "abc"})))


TEXT = """\
# the old one was hunter2x
name: told  # stays
environment:
  variables: {HF_TOKEN: "tok: en", PLAIN: abc}
  secrets:
    - A=hunter2x
    - NAMED
    - "B=two words"
  environment_variables:
    SOME_KEY: |
      many
      lines
    AFTER: stays
entrypoint: true
"""


def test_the_text_of_a_config_keeps_all_but_its_secrets() -> None:
    assert (
        hide_in_text(TEXT, ["hunter2x", "e"])
        == """\
# the old one was ***
name: told  # stays
environment:
  variables: {HF_TOKEN: "***", PLAIN: abc}
  secrets:
    - "A=***"
    - NAMED
    - "B=***"
  environment_variables:
    SOME_KEY: "***"
    AFTER: stays
entrypoint: true
"""
    )
    assert hide_in_text("environment: {secrets: {A: *nothing}}") is None
    shared = "e: &e {A_KEY: shown}\nenvironment: {secrets: {<<: *e, B: &b xyz}, variables: {C: *b}}"
    hidden = hide_in_text(shared)
    assert hidden is not None
    assert "shown" not in hidden
    assert "xyz" not in hidden


@pytest.mark.parametrize("secrets", [["HF", "B=given"], {"HF": None, "B": "given"}])
def test_a_secret_that_is_only_named_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, secrets: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("HF", "a=b")
        loaded = load_config(config(secrets=secrets))
        assert loaded.environment.secrets == {"HF": "a=b", "B": "given"}
    with pytest.raises(ConfigError, match=r"environment.secrets.HF` must be a variable of your"):
        load_config(config(secrets=secrets))


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        ({"A": 12345}, "must be a string"),
        ({"1A": "12345"}, "must be named as a variable"),
        ("12345", "must be a map or a list"),
        (["A=12345", "A=12345"], "must not give `A` twice"),
        ({"V": "12345"}, "must not be given in `environment.variables` as well"),
    ],
)
def test_what_is_wrong_with_a_secret_is_told_without_it(secrets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        validate_config(config(secrets=secrets, variables={"V": "v"}))
    assert "12345" not in str(caught.value)


def test_hidden_values_are_those_of_the_experiment_that_a_config_comes_from() -> None:
    given = config(secrets={"A": "***", "B": "new"}, variables={"X_TOKEN": "***", "STARS": "***"})
    resolved = validate_config(given).to_json()
    shown = reveal_secrets(resolved, {"X_TOKEN": "true one"}, {"A": "a", "B": "b"})
    assert shown["environment"]["secrets"] == {"A": "a", "B": "new"}
    assert shown["environment"]["variables"] == {"X_TOKEN": "true one", "STARS": "***"}
    with pytest.raises(ConfigError, match=r"(?s)secrets.A` must have its.*X_TOKEN` must have its"):
        reveal_secrets(resolved, {}, {})


def test_secrets_are_merged_one_by_one() -> None:
    merged = merge_configs(config(secrets={"A": "***", "B": "***"}), config(secrets=["B=new"]))
    assert merged["environment"]["secrets"] == {"A": "***", "B": "new"}
