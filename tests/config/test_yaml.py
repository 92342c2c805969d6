from pathlib import Path

import pytest

from paceline.config import ConfigError, load_config
from paceline.config._read_yaml import apply_overrides, parse_yaml

MINIMAL = "entrypoint: python3 train.py\nsearcher: {name: single, metric: loss}\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-1E+4", -10000.0),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("7", 7),
        ("-7", -7),
        ("0x10", 16),
        ("1_000", 1000),
        ("08", "08"),
        ("12:30", "12:30"),
        ("2024-01-31", "2024-01-31"),
        ("1.2.3", "1.2.3"),
        ("e3", "e3"),
        ("true", True),
        ("no", False),
        ("~", None),
        ('"1e-3"', "1e-3"),
    ],
)
def test_scalars_are_read_as_one_would_expect(text: str, value: object) -> None:
    parsed = parse_yaml(f"x: {text}")["x"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("", "my.yaml", "must not be empty"),
        ("# nothing\n", "my.yaml", "must not be empty"),
        ("- a\n- b\n", "my.yaml", "must hold a map"),
        ("just text", "my.yaml", "must hold a map"),
        ("a: 1\nb: [2\n", "my.yaml:2", "must be valid YAML"),
        ('a: "1\nb: 2\n\n', "my.yaml:1", "unexpected end of stream"),
        ("a: 1\nb: c: d\n", "my.yaml:2", "mapping values are not allowed here"),
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", "my.yaml:5", "`c` stands twice, first in line 3"),
        ("a: 1\n---\nb: 2\n", "my.yaml:2", "single document"),
        ("a: 1\nb: \x01\n", "my.yaml:2", "#x0001 is not allowed"),
        ("a: 1\nb: !!python/name:os.system ''\n", "my.yaml:2", "could not determine a constructor"),
        ("a: " + "[" * 2000 + "]" * 2000, "my.yaml:1", "must nest at most 100 levels deep"),
        ("a: 1\nb: &b\n  c: *b\n", "my.yaml:3", "must not hold itself"),
        ("a: " + "9" * 5000, "my.yaml", "must be valid YAML"),
    ],
)
def test_text_that_is_no_config_is_refused_with_its_line(
    text: str, path: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, file_name="my.yaml")
    [problem] = caught.value.problems
    assert problem.path == path
    assert message in problem.message
    assert "\n" not in str(caught.value)


def test_a_merge_key_may_give_a_key_that_the_map_has_as_well() -> None:
    data = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert data["b"] == {"x": 3, "y": 2}


def laughs(innermost: str, levels: int, times: int = 9) -> str:
    """Return YAML in which each line holds the line before `times` times."""
    lines = [f"a0: &a0 {innermost}"]
    for level in range(1, levels):
        names = ", ".join([f"*a{level - 1}"] * times)
        lines.append(f"a{level}: &a{level} [{names}]")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (laughs("[x, x, x, x, x, x, x, x, x]", 9), 6, "at most 200,000 values"),
        (laughs("{x: 1}", 30, times=2), 16, "at most 200,000 values"),
        # Many long texts are as large as many short ones.
        (laughs("x" * 30_000, 4), 4, "at most 10,000,000 characters"),
        # Merged maps are counted like any other.
        ("a0: &a0 {x: 1}\n" + "\n".join(
            f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)
        ), 16, "at most 200,000 values"),
        # Each line is flat, and the last one nests as deeply as there are lines.
        (laughs("[x]", 200, times=1), 99, "must nest at most 100 levels deep"),
    ],
    ids=["billion_laughs", "maps", "characters", "merges", "depth"],
)  # fmt: skip
def test_text_that_expands_without_bound_is_refused(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, file_name="my.yaml")
    [problem] = caught.value.problems
    assert problem.path == f"my.yaml:{line}"
    assert message in problem.message


def test_an_override_that_expands_without_bound_is_refused() -> None:
    text = "[" + laughs("[x, x, x, x, x, x, x, x, x]", 9).strip().replace("\n", ", ") + "]"
    with pytest.raises(ConfigError, match="`--config data:1` must hold at most 200,000 values"):
        apply_overrides({}, [f"data={text}"])


def test_anchors_aliases_and_merges_within_the_limits_work() -> None:
    text = (
        """
        common: &common {lr: 0.1, layers: [&width 64, *width]}
        first: &first
          <<: *common
          depth: 2
        second:
          <<: [*first, *common]
          depth: 3
        many: ["""
        + ", ".join(["*common"] * 1000)
        + "]\n"
    )
    data = parse_yaml(text)
    assert data["first"] == {"lr": 0.1, "layers": [64, 64], "depth": 2}
    assert data["second"] == {"lr": 0.1, "layers": [64, 64], "depth": 3}
    assert data["many"] == [data["common"]] * 1000


def test_a_config_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "const.yaml"
    file.write_text(MINIMAL)
    assert load_config(file) == load_config(str(file))
    assert load_config(file).name == "train"


def test_a_missing_file_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent\.yaml` must be a file that can be read.*No such"
    ):
        load_config(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be UTF-8 text"):
        load_config(file)
