"""Launch data for the runner and the processes of an attempt."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from paceline._network_interfaces import LOOPBACK
from paceline._usable_cores import num_cores
from paceline.config import Environment, ExperimentConfig, build_command, hide_secrets
from paceline.journal import RunInfo, TrialInfo
from paceline.master.executors import Launch
from paceline.master.experiments._attempt_control import read_control_of
from paceline.master.experiments._runner_leases import DEFAULT_LEASE_S
from paceline.master.store import config_of, num_slots_of, slots_by_node, tables
from paceline.messages.attempts import AttemptSpec, StorageMark
from paceline.messages.node_runners import LOCAL_NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The machine on which an attempt runs.

    Attributes:
        name: Its name among the nodes.
        devices: One entry per slot: "cpu" or a GPU's id.
        num_cores: Its CPU cores.
        python: The interpreter of attempts that name none.
        address: Where other nodes reach it.
    """

    name: str
    devices: tuple[str, ...]
    num_cores: int
    python: str
    address: str = LOOPBACK


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The master's own machine; what gives an attempt its place, its token and its secrets.

    `devices` has one entry per slot, "cpu" or a GPU's id. `place_of` gives the place of another
    node by its id, None if there is none. `mark_of` marks a storage directory for nodes, or raises
    `StoragePendingError` while that takes.
    """

    home: Path
    cluster_id: str
    devices: tuple[str, ...]
    token_of: Callable[[int], str] = field(repr=False)
    secrets_of: Callable[[int], dict[str, str]] = field(default=lambda _: {}, repr=False)
    place_of: Callable[[int], Place | None] = field(default=lambda _: None, repr=False)
    mark_of: Callable[[str], StorageMark | None] = field(default=lambda _: None, repr=False)
    lease_s: float = DEFAULT_LEASE_S

    @property
    def default_storage(self) -> str:
        """Where checkpoints go unless the configuration says otherwise."""
        return str(self.home / "checkpoints")

    def place(self, node_id: int | None) -> Place:
        """Return where an attempt runs.

        Raises:
            LookupError: There is no such node.
        """
        if node_id is None:
            return Place(
                name=LOCAL_NAME,
                devices=self.devices,
                num_cores=num_cores(),
                python=sys.executable,
            )
        place = self.place_of(node_id)
        if place is None:
            raise LookupError(f"There is no node {node_id}.")
        return place


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlacedAttempt:
    """An attempt with its trial and experiment, and where it runs: `parts` are places and slots.

    `member` is the part that is to be started.
    """

    attempt: Row[Any]
    trial: Row[Any]
    experiment: Row[Any]
    config: ExperimentConfig
    parts: list[tuple[Place, list[int]]]
    member: int
    storage: str


def build_launch(connection: Connection, node: Node, attempt_id: int, member: int = 0) -> Launch:
    """Return what starts an attempt on one of its nodes.

    It depends on the database and the nodes alone.

    Raises:
        StoragePendingError: A storage directory has not been marked yet; ask again.
    """
    placed = _read_placed(connection, node, attempt_id, member)
    return Launch(
        spec=_spec_of(connection, node, placed),
        info=_run_info_of(node, placed),
        secrets=node.secrets_of(placed.experiment.id),
    )


def _read_placed(
    connection: Connection, node: Node, attempt_id: int, member: int
) -> _PlacedAttempt:
    attempts, trials, experiments = tables.attempts, tables.trials, tables.experiments
    attempt = connection.execute(select(attempts).where(attempts.c.id == attempt_id)).one()
    trial = connection.execute(select(trials).where(trials.c.id == attempt.trial_id)).one()
    experiment = connection.execute(
        select(experiments).where(experiments.c.id == trial.experiment_id)
    ).one()
    config = config_of(experiment)
    return _PlacedAttempt(
        attempt=attempt,
        trial=trial,
        experiment=experiment,
        config=config,
        parts=[(node.place(node_id or None), s) for node_id, s in slots_by_node(attempt).items()],
        member=member,
        storage=checkpoint_root(config) or node.default_storage,
    )


def _spec_of(connection: Connection, node: Node, placed: _PlacedAttempt) -> AttemptSpec:
    attempt, trial, config = placed.attempt, placed.trial, placed.config
    environment, parts, member = config.environment, placed.parts, placed.member
    place, slots = parts[member]
    # A master with more slots may have placed the attempt and died before it started it.
    devices = [place.devices[slot] for slot in slots if slot < len(place.devices)]
    num_threads = place.num_cores * len(devices) // max(1, len(place.devices))
    python = environment.python or place.python
    fewest = config.resources.fewest_slots
    return AttemptSpec(
        attempt_id=attempt.id,
        trial_id=trial.id,
        number=attempt.number,
        entrypoint=build_command(
            config.entrypoint,
            hparams=trial.hparams,
            # The one of the environment that the runner makes comes first on PATH then.
            python="python3" if environment.uv else python,
            num_slots=num_slots_of(attempt),
            prefix=environment.prefix,
        ),
        python=python,
        variables=_variables(environment),
        working_dir=environment.working_dir,
        context_digest=placed.experiment.context_digest,
        slot_ids=slots,
        num_threads=max(1, num_threads),
        gpu_ids=[device for device in devices if device != "cpu"],
        keep_directory=config.debug,
        control=read_control_of(connection, attempt.id),
        lease_s=node.lease_s,
        # Of each node, as two of them can be on one machine.
        mark=f"{node.cluster_id}.{attempt.id}" + (f".{member}" if len(parts) > 1 else ""),
        token=node.token_of(attempt.id),
        experiment_id=placed.experiment.id,
        secret_names=sorted(environment.secrets),
        member=member,
        num_members=len(parts),
        num_shards=most if (most := config.resources.most_slots) > fewest else None,
        storage_mark=None if attempt.node_id is None else node.mark_of(placed.storage),
        has_prefix=bool(environment.prefix),
        uses_uv=environment.uv,
    )


def _run_info_of(node: Node, placed: _PlacedAttempt) -> RunInfo:
    attempt, trial, experiment = placed.attempt, placed.trial, placed.experiment
    parts, member = placed.parts, placed.member
    place, slots = parts[member]
    return RunInfo(
        run_id=f"trial-{trial.id}",
        name=experiment.name,
        created=attempt.created_at,
        attempt=attempt.number,
        trial=TrialInfo(
            trial_id=trial.id,
            experiment_id=experiment.id,
            trial_seed=trial.seed,
            hparams=trial.hparams,
            # The trial gets the values as variables; its directory may be copied and shown.
            config=hide_secrets(experiment.config),
        ),
        latest_checkpoint=attempt.resumed_from,
        steps_completed=attempt.resumed_steps,
        checkpoint_storage=placed.storage,
        cluster_id=node.cluster_id,
        agent_id=place.name,
        slot_ids=slots,
        container_addrs=[LOOPBACK] if len(parts) == 1 else [one.address for one, _ in parts],
        container_rank=member,
        container_slot_counts=[] if len(parts) == 1 else [len(held) for _, held in parts],
        judged_metrics=placed.config.searcher.judged_metrics,
        metadata=trial.metadata,
    )


def _variables(environment: Environment) -> dict[str, str]:
    if environment.uv and environment.python is not None:
        return {"UV_PYTHON": environment.python, **environment.variables}
    return environment.variables


def checkpoint_root(config: ExperimentConfig) -> str | None:
    """Return the directory or URL of a configuration's checkpoint storage, if it names one."""
    return None if config.checkpoint_storage is None else config.checkpoint_storage.root
