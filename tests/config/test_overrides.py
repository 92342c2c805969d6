import copy
from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import ConfigError, load_config

Make = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.x=3", 3),
        ("data.x=1e-2", 0.01),
        ("data.x=text", "text"),
        ("data.x=a=b", "a=b"),
        ("data.x=true", True),
        ("data.x=1,two,3.5", [1, "two", 3.5]),
        ("data.x=[1, 2]", [1, 2]),
        ("data.x={a: 1, b: [2]}", {"a": 1, "b": [2]}),
        ("data.x='a, b'", "a, b"),
        ('data.x="1"', "1"),
        ("data.x=", None),
    ],
)
def test_an_override_value_follows_the_rules_of_the_command_line(
    make: Make, override: str, value: object
) -> None:
    assert load_config(make(), [override]).data == {"x": value}


def test_overrides_apply_in_order_and_leave_the_source_alone(make: Make) -> None:
    data = make(data={"deep": {"kept": 1}})
    before = copy.deepcopy(data)
    config = load_config(
        data, ["data.deep.a=1", "data.deep.a=2", "resources.slots_per_trial=2", "max_restarts=0"]
    )
    assert config.data == {"deep": {"kept": 1, "a": 2}}
    assert config.resources.slots_per_trial == 2
    assert config.max_restarts == 0
    assert data == before


def test_a_single_label_becomes_a_list(make: Make) -> None:
    assert load_config(make(), ["labels=fast"]).labels == ["fast"]


def test_an_empty_value_resets_a_field_to_its_default(make: Make) -> None:
    assert load_config(make(max_restarts=0), ["max_restarts="]).max_restarts == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_restarts", "must name a field and its value"),
        ("=3", "must name a field and its value"),
        ("a..b=3", "must name a field and its value"),
        ("entrypoint.x=3", "`entrypoint` must be a map"),
        ("data.x=[1", "must be valid YAML"),
        ("max_restart=3", "did you mean `max_restarts`"),
    ],
)
def test_a_wrong_override_is_refused(make: Make, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(make(), [override])


def test_all_wrong_overrides_are_told_at_once(make: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(make(), ["a", "b", "data.fine=1"])
    assert [problem.value for problem in caught.value.problems] == ["a", "b"]
