"""How the client finds the master."""

import json
import socket
from pathlib import Path

import pytest

from paceline.client import Client, MasterUnreachableError
from paceline.client._http_session import find_master


def write_home(home: Path, port: int) -> None:
    facts = {"url": f"http://127.0.0.1:{port}", "pid": 1, "port": port, "version": "0.1.0"}
    (home / "master.json").write_text(json.dumps(facts))
    (home / "token").write_text("secret\n")


def test_the_home_names_url_and_token(home: Path) -> None:
    write_home(home, 8080)
    address = find_master()
    assert (address.url, address.token) == ("http://127.0.0.1:8080", "secret")


def test_environment_wins_over_the_home_and_arguments_over_both(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_home(home, 8080)
    monkeypatch.setenv("PACELINE_MASTER", "far:9000/")
    monkeypatch.setenv("PACELINE_TOKEN", "other")
    assert (find_master().url, find_master().token) == ("http://far:9000", "other")
    address = find_master("https://farther", "third")
    assert (address.url, address.token) == ("https://farther", "third")


def test_without_a_master_the_error_gives_the_command(home: Path) -> None:
    with pytest.raises(MasterUnreachableError, match="none does.*`paceline up --detach`"):
        find_master()


def test_a_missing_token_names_the_variable_if_something_answers(
    home: Path, free_port: int
) -> None:
    write_home(home, free_port)
    (home / "token").unlink()
    with pytest.raises(MasterUnreachableError, match=f"must answer at .*:{free_port}, but none"):
        find_master()
    refused = pytest.raises(MasterUnreachableError, match="PACELINE_TOKEN")
    with socket.create_server(("127.0.0.1", free_port)), refused:
        find_master()


@pytest.mark.parametrize("url", ["ftp://head", "http://", "head:port", "head:0", "http://[::1"])
def test_a_url_that_cannot_be_is_named(url: str) -> None:
    with pytest.raises(MasterUnreachableError, match="of the form http://HOST:PORT, but got"):
        find_master(url, "token")


def test_a_master_that_was_killed_is_unreachable(home: Path, free_port: int) -> None:
    write_home(home, free_port)
    with Client() as client, pytest.raises(MasterUnreachableError, match="paceline up --detach"):
        client.master()
