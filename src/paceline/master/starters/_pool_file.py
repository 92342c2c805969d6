"""The definitions of pools whose runners the master starts: `pools.yaml` in its home."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from paceline.config import Section, read_yaml_file
from paceline.master.starters._starter_base import Starter
from paceline.master.starters._starter_registry import starter_named
from paceline.messages.node_runners import NAME_PATTERN

POOL_FILE = "pools.yaml"


class PoolDefinition(Section):
    """How the runners of one pool are started.

    Attributes:
        starter: The name of what starts them, see `starter_named`.
        url: The address of the master for them; by default the one that it listens on.
        max_runners: How many there may be.
        slots: The slots of each, None for one per GPU or else CPU core. Then one is expected.
        idle_timeout: After how many seconds without an attempt a runner leaves.
        python: The interpreter on their machines, which has Paceline.
        directory: Where they keep their files; `~` is the home directory there.
        options: Fields of the starter.
    """

    starter: str
    url: str | None = None
    max_runners: Annotated[int, Field(ge=1, le=10_000)] = 1
    slots: Annotated[int, Field(ge=1, le=10_000)] | None = None
    idle_timeout: Annotated[float, Field(gt=0, le=10**7, allow_inf_nan=False)] = 300.0
    python: str = "python3"
    directory: str = "~/.paceline-runner"
    options: dict[str, Any] = {}


class _PoolFile(Section):
    pools: dict[Annotated[str, Field(pattern=NAME_PATTERN)], PoolDefinition] = {}


def read_pool_file(path: Path, cluster_id: str) -> dict[str, tuple[PoolDefinition, Starter]]:
    """Return the pools of a file with their starters, by name.

    Raises:
        ValueError: The file is not valid; the text has one line for each problem.
    """
    pools = {}
    for name, pool in read_pool_definitions(path).items():
        try:
            kind = starter_named(pool.starter)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: pools.{name}: {error}") from error
        if kind.module is not None and find_spec(kind.module) is None:
            raise ValueError(
                f"{path}: pools.{name}: The starter {pool.starter} needs the package"
                f" `{kind.module}`, which is not installed. Hint: pip install"
                f" 'paceline[{kind.module}]'"
            )
        options = _checked_pools(kind.Options, pool.options, path, f"pools.{name}.options.")
        pools[name] = (pool, kind(name, cluster_id, pool.directory, options))
    return pools


def read_pool_definitions(path: Path) -> dict[str, PoolDefinition]:
    """Return the pools of a file by name; their starters are not looked at.

    Raises:
        ValueError: The file is not valid; the text has one line for each problem.
    """
    found: _PoolFile = _checked_pools(_PoolFile, read_yaml_file(path), path, "")
    return found.pools


def _checked_pools(kind: type[Any], data: dict[str, Any], path: Path, prefix: str) -> Any:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{path}: {prefix}{'.'.join(map(str, one['loc']))}: {one['msg']}, but got"
            f" {one['input']!r}."
            for one in error.errors()
        ]
        raise ValueError("\n".join(lines)) from None
