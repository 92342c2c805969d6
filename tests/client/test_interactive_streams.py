"""Whose connections get through a tunnel, by the system's list and by real ones."""

import os
import socket
from pathlib import Path

import pytest

from paceline.client._interactive_streams import is_own_connection

# As Linux prints it: port 40000 of loopback to port 8888, of the user 1000.
TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:9C40 0200007F:22B8 01 00000000:00000000 00:00000000 00000000  1000        0 7 1
   1: 0200007F:22B8 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1001        0 8 1
   2: 0100007F:9C41 0200007F:22B8 01 00000000:00000000 00:00000000 00000000     0        0 9 1
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="NOT TESTED: Linux only")
@pytest.mark.parametrize(
    ("from_port", "uid", "is_own"),
    [
        (40000, 1000, True),
        (40000, 1001, False),
        # Root reads everything of everybody anyway.
        (40001, 1001, True),
        # A connection that is not in the list has gone, or was never of this machine.
        (40002, 1000, False),
    ],
)
def test_connection_of_another_user_does_not_get_through(
    tmp_path: Path, from_port: int, uid: int, is_own: bool
) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE)
    assert is_own_connection(("127.0.0.1", from_port), ("127.0.0.2", 8888), table, uid) is is_own


def test_connection_of_this_process_gets_through() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        with socket.create_connection(place) as one:
            assert is_own_connection(one.getsockname(), place)
            other = os.geteuid() + 1
            # Root's connections pass for everybody.
            assert is_own_connection(one.getsockname(), place, uid=other) is (os.geteuid() == 0)
