"""The addresses of this machine, and the interfaces that have them."""

import psutil
import pytest

from paceline._base.process_and_network import interface_of, listening_address


def interfaces_with(address: str) -> set[str]:
    entries = psutil.net_if_addrs().items()
    return {name for name, own in entries if any(one.address == address for one in own)}


@pytest.mark.parametrize(
    ("told", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")]
)
def test_an_address_of_this_machine_has_an_interface(told: str, address: str) -> None:
    names = interfaces_with(address)
    if not names:
        pytest.skip(f"no interface of this machine has {address}")
    assert interface_of(told) in names


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_another_machine_has_no_interface(address: str) -> None:
    assert interface_of(address) is None


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("no-such-host.invalid", "no-such-host.invalid"),
    ],
)
def test_a_server_listens_at_one_address_whatever_its_host_is_called(
    host: str, address: str
) -> None:
    assert listening_address(host) == address
