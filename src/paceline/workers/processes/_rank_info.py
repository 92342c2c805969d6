"""The rank of a worker, as its environment tells it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_Info = TypeVar("_Info", bound="RankInfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A worker's rank, and the node it is on."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_environment(
        cls: type[_Info], environment: Mapping[str, str] = os.environ, **more: Any
    ) -> _Info:
        """Return what the variables of a worker tell.

        Args:
            environment: The variables.
            more: Fields of a subclass.
        """
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            node_rank=int(environment["NODE_RANK"]),
            **more,
        )
