"""Where the ranks' store cannot be hosted as asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core import DistributedContext, DistributedTimeoutError, _key_value_store

# torch from PyPI has libuv. This is how a build without it behaves, such as Debian's torch 2.6.
WITHOUT_LIBUV = """
from torch import distributed
from torch.distributed import rendezvous

class TCPStore(distributed.TCPStore):
    def __init__(self, *arguments, use_libuv=True, **options):
        if use_libuv:
            raise RuntimeError(
                "use_libuv was requested but PyTorch was built without libuv support, run with"
                " USE_LIBUV=0 to disable it."
            )
        super().__init__(*arguments, use_libuv=False, **options)

distributed.TCPStore = rendezvous.TCPStore = TCPStore
"""
EXCHANGE = """
with core.DistributedContext.from_torch_distributed(timeout_s=60) as context:
    print(context.allgather(rank), flush=True)
"""
JOIN = """
join_process_group("gloo", timeout_s=60)
numbers = torch.tensor([rank])
distributed.all_reduce(numbers)
print(int(numbers), flush=True)
"""


@pytest.mark.parametrize("first", ["exchange", "join"])
def test_ranks_meet_with_a_torch_that_was_built_without_libuv(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any], first: str
) -> None:
    code = WITHOUT_LIBUV + (
        "import os, torch\nfrom paceline import core\n"
        "from paceline._training.workers.processes.rank_environment import join_process_group\n"
        "rank = int(os.environ['RANK'])\n"
    )
    code += EXCHANGE + JOIN if first == "exchange" else JOIN + EXCHANGE
    code += "os._exit(0)\n"
    expected = ["[0, 1, 2]", "3"] if first == "exchange" else ["3", "[0, 1, 2]"]
    for exit_code, output, errors in finish_ranks(start_ranks(code), timeout_s=60):
        assert (exit_code, output.split("\n")[:-1]) == (0, expected), errors


def make_rank_0(chief_ip: str, chief_port: int, timeout_s: float) -> DistributedContext:
    return DistributedContext(
        rank=0, size=3, local_rank=0, local_size=1, cross_rank=0, cross_size=3,
        chief_ip=chief_ip, chief_port=chief_port, timeout_s=timeout_s,
    )  # fmt: skip


# The first one is an address of documents; names below .invalid never exist.
@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_address_that_does_not_lead_to_rank_0_is_named(
    address: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_key_value_store, "_OWN_ADDRESS_S", 0.2)
    match = rf"must lead to its machine, but .* could not reach it at {address}:{free_port} for 0.2"
    with pytest.raises(DistributedTimeoutError, match=match):
        make_rank_0(address, free_port, 60)


def test_port_that_rank_0_may_not_have_is_named_at_once(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    lowest = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if not lowest.exists() or int(lowest.read_text()) <= 80:
        pytest.skip("NOT TESTED: anybody may listen at all ports here")
    code = """
import encodings.idna  # it could not be read later
import os
from paceline import core
if os.geteuid() == 0:
    os.setuid(65534)
core.DistributedContext.from_torch_distributed()
"""
    [(exit_code, _, errors)] = finish_ranks(
        start_ranks(code, missing=(1, 2), MASTER_PORT="80"), timeout_s=60
    )
    assert exit_code == 1
    assert "DistributedError: Rank 0 must be able to host a store at port 80, but" in errors
    assert "EACCES" in errors
