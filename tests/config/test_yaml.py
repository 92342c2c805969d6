from pathlib import Path

import pytest

from paceline.config import ConfigError, load_config, parse_yaml

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
        ("a: 1\nb: [2\n", "my.yaml:3", "must be valid YAML"),
        ("a: 1\nb: c: d\n", "my.yaml:2", "mapping values are not allowed here"),
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", "my.yaml:5", "`c` stands twice, first in line 3"),
        ("a: 1\n---\nb: 2\n", "my.yaml:2", "single document"),
        ("a: 1\nb: \x01\n", "my.yaml:2", "#x0001 is not allowed"),
        ("a: 1\nb: !!python/name:os.system ''\n", "my.yaml:2", "could not determine a constructor"),
        ("a: " + "[" * 2000 + "]" * 2000, "my.yaml", "must not nest"),
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
