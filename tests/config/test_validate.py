import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.config import ConfigError, ExperimentConfig, load_config, validate_config
from paceline.config._experiment_config import LogPolicy
from paceline.config._fields_and_problems import MISSING, Problem

Make = Callable[..., dict[str, Any]]
Collect = Callable[[dict[str, Any]], dict[str, Problem]]

TOP_LEVEL_LATER = [
    "data_layer",
    "integrations",
    "internal",
    "pbs",
    "project",
    "retention_policy",
    "security",
    "slurm",
    "tensorboard_storage",
    "workspace",
]
RESOURCES_LATER = [
    "agent_label",
    "is_single_node",
    "native_parallel",
    "slots",
]

SIZE = 'an integer of bytes, or text such as "20GB" or "512MiB"'
PERIOD = "an integer >= 0, or one of {batches: N}, {epochs: N}, {records: N}"


def test_a_minimal_config_gets_the_documented_defaults(make: Make) -> None:
    assert validate_config(make()).to_json() == {
        "name": "train",
        "description": "",
        "labels": [],
        "data": {},
        "searcher": {
            "name": "single",
            "metric": "loss",
            "smaller_is_better": True,
            "objectives": [],
            "source_trial_id": None,
            "source_checkpoint_uuid": None,
            "sampler": None,
            "points_to_evaluate": [],
            "warm_start_from": [],
            "limits": None,
            "stop_timeout": 30.0,
            "max_length": None,
        },
        "hyperparameters": {},
        "entrypoint": "python3 train.py",
        "resources": {
            "slots_per_trial": 1,
            "max_slots": None,
            "pool": None,
            "priority": None,
            "weight": 1.0,
            "allow_uneven": False,
            "interactive": False,
            "start_timeout": 300.0,
        },
        "max_restarts": 5,
        "checkpoint_policy": "best",
        "checkpoint_storage": None,
        "reproducibility": {"experiment_seed": None},
        "environment": {
            "python": None,
            "prefix": [],
            "variables": {},
            "secrets": {},
            "working_dir": None,
            "uv": False,
            "warm": True,
        },
        "profiling": {
            "enabled": False,
            "begin_on_batch": 0,
            "end_after_batch": None,
            "sync_timings": True,
        },
        "notify": {
            "to": [],
            "events": ["alert", "experiment_ended", "experiment_failed"],
            "alert_level": "info",
            "thresholds": [],
            "silent_after": None,
            "gpu_idle_after": None,
        },
        "idle": {"silent_after": None, "unused_after": None, "pause_after": None},
        "interactive": None,
        "log_policies": [],
        "preemption_timeout": 600.0,
        "debug": False,
        "min_validation_period": None,
        "min_checkpoint_period": None,
        "checkpoint_bytes_per_hour": None,
        "memory_checkpoints": None,
        "scheduling_unit": None,
        "perform_initial_validation": False,
        "optimizations": {
            "aggregation_frequency": 1,
            "average_aggregated_gradients": True,
            "mixed_precision": "O0",
            "average_training_metrics": None,
            "gradient_compression": None,
            "tensor_fusion_threshold": None,
            "tensor_fusion_cycle_time": None,
            "auto_tune_tensor_fusion": None,
            "grad_updates_size_file": None,
        },
        "records_per_epoch": None,
    }


def test_null_stands_for_a_field_that_is_not_given(make: Make) -> None:
    nulls = dict.fromkeys(validate_config(make()).to_json())
    given_fields = make(searcher={"name": "single", "metric": "loss", "stop_timeout": None})
    assert validate_config({**nulls, **given_fields}) == validate_config(make())


def test_every_problem_is_told_at_once_with_path_value_and_what_is_allowed() -> None:
    data = {
        "entrypont": "python3 train.py",
        "searcher": {"name": "random", "max_trials": 0},
        "hyperparameters": {
            "lr": {"type": "double", "minval": 3, "maxval": 1},
            "net": {"n": {"type": "int", "minval": 1}},
        },
        "resources": {"slots_per_trial": "2", "priority": 0},
        "checkpoint_storage": {"type": "gcs", "bucket": "b"},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    assert [(problem.path, problem.value) for problem in caught.value.problems] == [
        ("searcher.metric", MISSING),
        ("searcher.max_trials", 0),
        ("hyperparameters.lr.minval", 3),
        ("hyperparameters.net.n.maxval", MISSING),
        ("entrypoint", MISSING),
        ("resources.slots_per_trial", "2"),
        ("resources.priority", 0),
        ("checkpoint_storage.type", "gcs"),
        ("entrypont", "python3 train.py"),
    ]
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems)
    assert lines[0].startswith("`searcher.metric` is required")
    assert lines[1] == "`searcher.max_trials` must be an integer >= 1, got 0."
    assert "must be less than `lr.maxval` (1), got 3." in lines[2]
    assert lines[5] == '`resources.slots_per_trial` must be an integer, got "2".'
    assert lines[8].endswith("Hint: did you mean `entrypoint`?")


@pytest.mark.parametrize("data", [None, [], "name: a", 3])
def test_a_config_that_is_no_map_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="The config must be a map of fields"):
        validate_config(data)


@pytest.mark.parametrize(
    ("fields", "path", "suggestion"),
    [
        ({"max_restart": 3}, "max_restart", "max_restarts"),
        ({"slots_per_trial": 3}, "slots_per_trial", "resources.slots_per_trial"),
        ({"metric": "loss"}, "metric", "searcher.metric"),
        ({"min_validation_perod": 1}, "min_validation_perod", "min_validation_period"),
        (
            {"aggregation_frequency": 2},
            "aggregation_frequency",
            "optimizations.aggregation_frequency",
        ),
        ({"resources": {"slot_per_trial": 3}}, "resources.slot_per_trial", "slots_per_trial"),
        (
            {"resources": {"slots_per_trial": {"min": 1, "max": 2, "maxi": 3}}},
            "resources.slots_per_trial.maxi",
            "max",
        ),
        ({"resources": {"max_restarts": 3}}, "resources.max_restarts", "max_restarts"),
        (
            {"searcher": {"name": "single", "metric": "a", "metrc": 1}},
            "searcher.metrc",
            "metric",
        ),
        (
            {"checkpoint_storage": {"type": "directory", "path": "/a", "save_trial_bst": 1}},
            "checkpoint_storage.save_trial_bst",
            "save_trial_best",
        ),
        ({"idle": {"unused_aftr": 1}}, "idle.unused_aftr", "unused_after"),
        (
            {"log_policies": [{"pattern": "a", "action": "alert", "acton": 1}]},
            "log_policies[0].acton",
            "action",
        ),
        ({"notify": {"event": []}}, "notify.event", "events"),
        (
            {"notify": {"to": ["c"], "thresholds": [{"metric": "a", "above": 1, "belo": 1}]}},
            "notify.thresholds[0].belo",
            "below",
        ),
    ],
)
def test_an_unknown_field_lists_the_known_ones_and_the_nearest(
    make: Make, problems_of: Collect, fields: dict[str, Any], path: str, suggestion: str
) -> None:
    problems = problems_of(make(**fields))
    assert list(problems) == [path]
    assert problems[path].message == "is not a known field"
    assert problems[path].hint == f"did you mean `{suggestion}`?"
    assert len(problems[path].allowed.split(", ")) >= 2


def test_a_missing_field_of_an_item_of_a_list_is_named(make: Make, problems_of: Collect) -> None:
    """A log policy without its action, as anybody forgets it."""
    problems = problems_of(make(log_policies=[{"pattern": "a"}]))
    assert list(problems) == ["log_policies[0].action"]
    assert problems["log_policies[0].action"].message.startswith("is required: only an alert")


def test_a_near_name_stands_in_place_of_a_long_list(problems_of: Collect, make: Make) -> None:
    near = problems_of(make(max_restart=3))["max_restart"]
    assert str(near) == (
        "`max_restart` is not a known field, got 3. Hint: did you mean `max_restarts`?"
    )
    assert "Allowed: checkpoint_bytes_per_hour, " in str(problems_of(make(zzz=3))["zzz"])


@pytest.mark.parametrize("value", [None, 1, {"a": 1}])
@pytest.mark.parametrize("name", TOP_LEVEL_LATER)
def test_a_field_that_comes_later_is_told_from_an_unknown_one(
    make: Make, problems_of: Collect, name: str, value: object
) -> None:
    assert problems_of(make(**{name: value}))[name].message == "is not offered yet"


@pytest.mark.parametrize("name", RESOURCES_LATER)
def test_a_resource_that_comes_later_is_told_from_an_unknown_one(
    make: Make, problems_of: Collect, name: str
) -> None:
    problems = problems_of(make(resources={name: 1}))
    assert problems[f"resources.{name}"].message == "is not offered yet"


@pytest.mark.parametrize(
    ("fields", "path", "hint"),
    [
        ({"environment": {"image": "torch"}}, "environment.image", "environment.prefix: [apptain"),
        ({"bind_mounts": []}, "bind_mounts", "use the paths of the machine"),
        ({"workspace": "a"}, "workspace", "labels: [NAME]"),
        ({"slurm": {}}, "slurm", "`resources.pool`"),
        ({"resources": {"slots_per_trial": 0}}, "resources.slots_per_trial", "a core of the CPU"),
        (
            {"environment": {"environment_variables": {"cpu": {"A": "1"}, "cuda": ["A=1"]}}},
            "environment.environment_variables.cpu",
            "one level up",
        ),
        (
            {"entrypoint": "python3 -m determined.launch.torch_distributed train.py"},
            "entrypoint",
            "write `paceline.launch.torch_distributed`",
        ),
        (
            {"entrypoint": ["python3", "-m", "determined.launch.horovod", "train.py"]},
            "entrypoint",
            "write `paceline.launch.horovod`",
        ),
    ],
)
def test_fields_of_the_predecessor_have_a_hint_with_what_replaces_them(
    make: Make, problems_of: Collect, fields: dict[str, Any], path: str, hint: str
) -> None:
    assert hint in problems_of(make(**fields))[path].hint


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"max_restarts": 1}, "max_restarts", "must be 0 with `interactive`"),
        (
            {"searcher": {"name": "random", "metric": "m", "max_trials": 2}},
            "searcher.name",
            "must be `single` with `interactive`",
        ),
    ],
)
def test_interactive_work_is_one_trial_that_is_not_started_again(
    make: Make, problems_of: Collect, fields: dict[str, Any], path: str, message: str
) -> None:
    right = {
        "interactive": {"kind": "shell", "idle_timeout": "2h"},
        "searcher": {"name": "single", "metric": "m"},
        "max_restarts": 0,
        "hyperparameters": {},
    }
    section = validate_config(make(**right)).interactive
    assert section is not None
    assert section.idle_timeout == 7200
    assert problems_of(make(**(right | fields)))[path].message == message


def test_a_pool_may_be_named_as_the_predecessor_names_it(make: Make) -> None:
    assert validate_config(make(resources={"resource_pool": "big"})).resources.pool == "big"


@pytest.mark.parametrize("name", ["image", "ports", "pod_spec", "registry_auth"])
def test_containers_are_refused_by_name(make: Make, problems_of: Collect, name: str) -> None:
    problems = problems_of(make(environment={name: "x"}))
    assert "without containers" in problems[f"environment.{name}"].message


@pytest.mark.parametrize(
    ("fields", "path", "allowed"),
    [
        ({"name": ""}, "name", "a non-empty string"),
        ({"name": 3}, "name", "a string"),
        ({"labels": "a"}, "labels", "a list"),
        ({"labels": ["a", 3]}, "labels[1]", "a string"),
        ({"labels": [" "]}, "labels[0]", "a non-empty string"),
        ({"max_restarts": -1}, "max_restarts", "an integer >= 0"),
        ({"max_restarts": True}, "max_restarts", "an integer"),
        ({"max_restarts": 2.0}, "max_restarts", "an integer"),
        ({"max_restarts": 2**60}, "max_restarts", "an integer <= 9007199254740991"),
        ({"checkpoint_policy": "latest"}, "checkpoint_policy", "'best', 'all' or 'none'"),
        ({"debug": "yes"}, "debug", "true or false"),
        ({"preemption_timeout": 0}, "preemption_timeout", "a number > 0"),
        ({"preemption_timeout": float("inf")}, "preemption_timeout", "a finite number"),
        ({"preemption_timeout": "1h"}, "preemption_timeout", "a number"),
        ({"resources": 4}, "resources", "a map of fields"),
        ({"resources": {"slots_per_trial": 0}}, "resources.slots_per_trial", "an integer >= 1"),
        ({"resources": {"priority": 100}}, "resources.priority", "an integer <= 99"),
        ({"resources": {"weight": 0}}, "resources.weight", "a number > 0"),
        (
            {"resources": {"slots_per_trial": {"min": 0, "max": 2}}},
            "resources.slots_per_trial.min",
            "an integer >= 1",
        ),
        (
            {"resources": {"slots_per_trial": {"min": 4, "max": 2}}},
            "resources.slots_per_trial.max",
            "an integer >= 4",
        ),
        (
            {"resources": {"slots_per_trial": {"min": 3, "max": 8}, "max_slots": 2}},
            "resources.max_slots",
            "an integer >= 3",
        ),
        (
            {"resources": {"slots_per_trial": 4, "max_slots": 2}},
            "resources.max_slots",
            "an integer >= 4",
        ),
        (
            {"reproducibility": {"experiment_seed": 2**31}},
            "reproducibility.experiment_seed",
            "an integer <= 2147483647",
        ),
        (
            {"profiling": {"begin_on_batch": 5, "end_after_batch": 4}},
            "profiling.end_after_batch",
            "an integer >= 5",
        ),
        ({"min_validation_period": -1}, "min_validation_period", PERIOD),
        (
            {"min_checkpoint_period": {"steps": 1}},
            "min_checkpoint_period",
            PERIOD + ", or continuous",
        ),
        (
            {"min_checkpoint_period": {"batches": 1, "epochs": 1}},
            "min_checkpoint_period",
            PERIOD + ", or continuous",
        ),
        ({"min_validation_period": "continuous"}, "min_validation_period", PERIOD),
        ({"checkpoint_bytes_per_hour": "20 gigabytes"}, "checkpoint_bytes_per_hour", SIZE),
        ({"checkpoint_storage": {"save_bytes": 0}}, "checkpoint_storage.save_bytes", SIZE),
        (
            {"checkpoint_storage": {"save_age": "soon"}},
            "checkpoint_storage.save_age",
            'seconds, or text such as "7d", "12h" or "30min"',
        ),
        ({"min_validation_period": {"records": True}}, "min_validation_period", PERIOD),
        ({"scheduling_unit": 0}, "scheduling_unit", "an integer >= 1"),
        ({"perform_initial_validation": 1}, "perform_initial_validation", "true or false"),
        (
            {"optimizations": {"aggregation_frequency": 0}},
            "optimizations.aggregation_frequency",
            "an integer >= 1",
        ),
        (
            {"optimizations": {"mixed_precision": "O2"}},
            "optimizations.mixed_precision",
            "'O0' or 'O1'",
        ),
        (
            {"optimizations": {"mixed_precision": "fp16"}},
            "optimizations.mixed_precision",
            "'O0' or 'O1'",
        ),
        ({"data": [1]}, "data", "a map"),
        ({"data": {"a": [{"b": float("nan")}]}}, "data.a[0].b", "a finite number"),
        ({"data": {"a": 2**64}}, "data.a", "an integer of 64 bits"),
        ({"data": {"a": "\ud800"}}, "data.a", "text without lone surrogates"),
        (
            {"data": {"a": b"x"}},
            "data.a",
            "null, true, false, a number, a string, a list or a map",
        ),
        ({"data": {"a": {1: 2}}}, "data.a", "names such as `lr`"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(
    make: Make, problems_of: Collect, fields: dict[str, Any], path: str, allowed: str
) -> None:
    problems = problems_of(make(**fields))
    assert list(problems) == [path]
    assert problems[path].allowed == allowed


def test_names_that_are_no_strings_are_refused(make: Make, problems_of: Collect) -> None:
    data: dict[Any, Any] = {**make(), 1: 2}
    problems = problems_of(data)
    assert problems[""].value == 1
    assert problems[""].message == "must have strings as names"


def test_a_value_that_contains_itself_is_refused(make: Make, problems_of: Collect) -> None:
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    [problem] = problems_of(make(data=cycle)).values()
    assert problem.path.startswith("data.again.again")
    [problem] = problems_of(make(unknown=cycle)).values()
    assert problem.value_text == "a value of type dict"


def test_a_value_that_doubles_at_every_level_is_refused(make: Make, problems_of: Collect) -> None:
    value: Any = 1
    for _ in range(40):
        value = [value, value]
    [problem] = problems_of(make(data={"a": value})).values()
    assert "must have at most 64 levels and 200000 values" in problem.message


@pytest.mark.parametrize(
    ("variables", "result"),
    [
        ({"A": "1", "b_2": ""}, {"A": "1", "b_2": ""}),
        (["A=1", "B=x=y", "C="], {"A": "1", "B": "x=y", "C": ""}),
        ([], {}),
    ],
)
@pytest.mark.parametrize("name", ["variables", "environment_variables"])
def test_variables_come_as_a_map_or_as_a_list(
    make: Make, name: str, variables: object, result: dict[str, str]
) -> None:
    assert validate_config(make(environment={name: variables})).environment.variables == result


@pytest.mark.parametrize(
    ("environment", "path", "message"),
    [
        ({"variables": {"A": 1}}, "environment.variables.A", "must be a string"),
        ({"variables": {"1A": "x"}}, "environment.variables.1A", "must be named as a variable"),
        ({"variables": ["A"]}, "environment.variables[0]", "must give a variable and its value"),
        ({"variables": ["A=1", "A=2"]}, "environment.variables[1]", "must not give `A` twice"),
        ({"variables": "A=1"}, "environment.variables", "must be a map or a list"),
        (
            {"variables": {"PACELINE_RUN_DIR": "/x"}},
            "environment.variables.PACELINE_RUN_DIR",
            "is set by Paceline itself",
        ),
        (
            {"variables": {}, "environment_variables": []},
            "environment.environment_variables",
            "is an older name of `variables`",
        ),
        ({"working_dir": "here"}, "environment.working_dir", "must be an absolute path"),
        ({"python": "venv/bin/python"}, "environment.python", "does not depend on a directory"),
        ({"python": ""}, "environment.python", "does not depend on a directory"),
        ({"prefix": "nice"}, "environment.prefix", "must be a list"),
        ({"prefix": [""]}, "environment.prefix", "must name a program first"),
        ({"prefix": ["nice", 5]}, "environment.prefix[1]", "must be a string"),
        ({"prefix": ["ni\0ce"]}, "environment.prefix[0]", "must not have a null character"),
    ],
)
def test_a_wrong_environment_is_refused(
    make: Make, problems_of: Collect, environment: object, path: str, message: str
) -> None:
    problems = problems_of(make(environment=environment))
    assert list(problems) == [path]
    assert message in problems[path].message


@pytest.mark.parametrize("python", ["python3.11", "/opt/venv/bin/python"])
def test_an_interpreter_is_a_command_or_an_absolute_path(make: Make, python: str) -> None:
    assert validate_config(make(environment={"python": python})).environment.python == python


def test_repeated_labels_count_once_and_keep_their_order(make: Make) -> None:
    assert validate_config(make(labels=["b", "a", "b", "c", "a"])).labels == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({}, []),
        ({"records_per_epoch": 100}, ["records_per_epoch"]),
        ({"checkpoint_bytes_per_hour": "1GB"}, ["checkpoint_bytes_per_hour"]),
        (
            {
                "min_validation_period": {"batches": 0},
                "min_checkpoint_period": {"records": 10},
                "scheduling_unit": 10,
                "perform_initial_validation": True,
                "optimizations": {
                    "aggregation_frequency": 2,
                    "average_aggregated_gradients": False,
                    "mixed_precision": "O1",
                },
                "profiling": {"enabled": True, "begin_on_batch": 5, "end_after_batch": 5},
            },
            [],
        ),
        (
            {
                "optimizations": {
                    "average_training_metrics": True,
                    "gradient_compression": False,
                    "tensor_fusion_threshold": 64,
                    "tensor_fusion_cycle_time": 1,
                    "auto_tune_tensor_fusion": False,
                    "grad_updates_size_file": "sizes.json",
                }
            },
            [
                "optimizations.average_training_metrics",
                "optimizations.gradient_compression",
                "optimizations.tensor_fusion_threshold",
                "optimizations.tensor_fusion_cycle_time",
                "optimizations.auto_tune_tensor_fusion",
                "optimizations.grad_updates_size_file",
            ],
        ),
        (
            {
                "searcher": {
                    "name": "async_halving",
                    "metric": "a",
                    "max_trials": 2,
                    "num_rungs": 1,
                    "max_length": 3,
                    "stop_once": True,
                }
            },
            ["searcher.stop_once"],
        ),
    ],
)
def test_settings_without_effect_are_warned_about(
    make: Make, fields: dict[str, Any], warned: list[str]
) -> None:
    config = validate_config(make(**fields))
    assert [text.split("`")[1] for text in config.warnings] == warned
    assert validate_config(config.to_json()).warnings == config.warnings


def test_a_config_cannot_be_changed(make: Make) -> None:
    config = validate_config(make())
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "other"


def test_a_config_checks_itself_when_it_is_made_directly() -> None:
    with pytest.raises(ValidationError, match="must not be blank"):
        ExperimentConfig.model_validate(
            {"entrypoint": "", "searcher": {"name": "single", "metric": "a"}}
        )


def test_a_config_shares_nothing_with_its_source(make: Make) -> None:
    data = make(data={"a": [1]}, hyperparameters={"x": [1]}, entrypoint=["a"], labels=["l"])
    config = validate_config(data)
    before = config.to_json()
    data["data"]["a"].append(2)
    data["hyperparameters"]["x"].append(2)
    data["entrypoint"].append("b")
    data["labels"].append("m")
    assert config.to_json() == before


def test_an_error_survives_pickling(make: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(make(nam=1, entrypoint=None))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.problems, str(copy)) == (caught.value.problems, str(caught.value))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(
    data=st.dictionaries(st.text(min_size=1), _JSON, max_size=3),
    seed=st.none() | st.integers(0, 2**31 - 1),
    labels=st.lists(st.text(min_size=1).filter(lambda t: t.strip() and "\0" not in t)),
    divisor=st.floats(1, 100, exclude_min=True) | st.integers(2, 9),
    length=st.integers(1, 10**9) | st.builds(
        lambda u, n: {u: n}, st.sampled_from(["batches", "epochs"]), st.integers(1, 99)
    ),
)  # fmt: skip
def test_the_resolved_config_loads_again_to_an_equal_one(
    data: dict[str, Any],
    seed: int | None,
    labels: list[str],
    divisor: float,
    length: object,
) -> None:
    searcher = {"metric": "a", "max_trials": 3, "divisor": divisor, "max_length": length}
    config = validate_config(
        {
            "entrypoint": "t",
            "searcher": {"name": "adaptive_asha", **searcher},
            "data": data,
            "hyperparameters": {"c": {"type": "const", "val": data}},
            "labels": labels,
            "reproducibility": {"experiment_seed": seed},
        }
    )
    text = json.dumps(config.to_json(), allow_nan=False)
    again = validate_config(json.loads(text))
    assert again == config
    assert again.to_json() == config.to_json()


@given(
    st.dictionaries(
        st.sampled_from(["entrypoint", "searcher", "hyperparameters", "resources", "environment",
                         "checkpoint_storage", "data", "labels", "name", "profiling", "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
            | st.sampled_from(["single", "grid", "directory", "int", "const"]),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                st.sampled_from(["name", "type", "metric", "path", "minval", "variables", "x"])
                | st.integers(0, 2), inner, max_size=3),
            max_leaves=8,
        ),
    )
)  # fmt: skip
def test_any_data_gives_a_config_or_problems_with_text(data: dict[str, Any]) -> None:
    error = None
    try:
        config = validate_config(data)
    except ConfigError as e:
        error = e
    if error is None:
        assert validate_config(config.to_json()) == config
    else:
        assert error.problems
        assert len(str(error).splitlines()) == len(error.problems)


@pytest.mark.parametrize(
    ("pattern", "line", "is_match"),
    [
        ("ECC", "an ECC error", True), ("ECC", "an ecc error", False),
        ("CUDA*assert", "CUDA error: device-side assert", True),
        ("assert*CUDA", "CUDA error: device-side assert", False),
        ("aa*aa", "aaa", False), ("*", "", True), (".+", "abc", False),
    ],
)  # fmt: skip
def test_a_log_policy_matches_its_parts_in_order(pattern: str, line: str, is_match: bool) -> None:
    """A star is any text, and nothing else has a meaning."""
    assert LogPolicy(pattern=pattern, action="alert").matches(line) is is_match


def test_a_log_policy_reads_a_line_once(make: Make) -> None:
    """Many stars on a long line take no longer than one; more policies than 20 are refused."""
    policy = {"pattern": "a*" * 100, "action": "no_retry"}
    assert LogPolicy(**policy).matches("a" * 99 + "b" * 1_000_000) is False
    with pytest.raises(ConfigError, match="log_policies"):
        validate_config(make(log_policies=[policy] * 21))
    with pytest.raises(ConfigError, match="no effect without an alert"):
        validate_config(make(idle={"pause_after": "10min"}))
