"""The variables and the port that place each worker."""

import socket

import pytest

from paceline._base.process_and_network import PortReservation, num_cores
from paceline._training.workers.processes.rank_environment import (
    SHARDS_VARIABLE,
    NodeLayout,
    is_port_free,
    launcher_shards,
    rank_environment,
    thread_environment,
)


def test_each_worker_is_told_its_place() -> None:
    layout = NodeLayout(
        num_local_workers=2, num_nodes=3, node_rank=1, master_address="10.0.0.1", master_port=29400
    )
    environment = rank_environment({"HOME": "/h"}, layout, 1)
    assert {
        k: v for k, v in environment.items() if k not in ("OMP_NUM_THREADS", "PACELINE_THREADS")
    } == {
        "HOME": "/h",
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29400",
    }


def test_a_network_interface_that_the_user_chose_stays() -> None:
    layout = NodeLayout(num_local_workers=2, master_port=1)
    environment = rank_environment({"GLOO_SOCKET_IFNAME": "eth7"}, layout, 0)
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("base", "num_workers", "threads"),
    [
        ({}, 1, str(num_cores())),
        ({}, 10_000, "1"),
        ({"OMP_NUM_THREADS": "7"}, 2, None),
        ({"OMP_NUM_THREADS": "7", "PACELINE_THREADS": "7"}, 2, "3"),
        ({"OMP_NUM_THREADS": "1", "PACELINE_THREADS": "1"}, 2, "1"),
    ],
)
def test_cores_are_shared_unless_the_user_set_threads(
    base: dict[str, str], num_workers: int, threads: str | None
) -> None:
    assert thread_environment(base, num_workers).get("OMP_NUM_THREADS") == threads


def test_a_reserved_port_is_refused_to_others_and_open_to_a_store() -> None:
    with PortReservation() as reservation:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", reservation.port))
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", reservation.port))
            store.listen()
            assert not is_port_free(reservation.port)
    assert is_port_free(reservation.port)


def test_a_launcher_may_tell_the_number_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARDS_VARIABLE, raising=False)
    assert launcher_shards() is None
    monkeypatch.setenv(SHARDS_VARIABLE, "4")
    assert launcher_shards() == 4
    monkeypatch.setenv(SHARDS_VARIABLE, "0")
    with pytest.raises(ValueError, match="PACELINE_NUM_SHARDS must be a number from 1 on"):
        launcher_shards()
