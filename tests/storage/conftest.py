"""Servers that take the requests of stores, and troubles on the way to them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from fault_lab.object_requests import FaultyServer


@pytest.fixture
def faulty_azure(
    azure: str, azure_server: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyServer]:
    """Return a server on the way to Azurite's; the URL of the `azure` fixture goes through it."""
    server = FaultyServer(azure_server)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{server.url}{urlsplit(azure_server).path}")
    yield server
    server.close()


@pytest.fixture
def faulty(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """Return a server on the way to S3's; the URL of the `s3` fixture goes through it."""
    server = FaultyServer(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    yield server
    server.close()
