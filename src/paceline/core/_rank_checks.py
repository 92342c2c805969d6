"""Checks of a place among several ranks, as it was given."""

from paceline._network_interfaces import LOOPBACK


def check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:
        raise ValueError(f"`timeout_s` must be above 0, but got {timeout_s}.")


def check_place(name: str, value: int, bound_name: str, bound: int) -> None:
    if bound < 1 or not 0 <= value < bound:
        raise ValueError(
            f"`{name}` must be from 0 to `{bound_name}` - 1, but got {name}={value} and"
            f" {bound_name}={bound}."
        )


def check_address(chief_ip: str | None, chief_port: int | None, num_nodes: int) -> tuple[str, int]:
    if chief_ip is None:
        if num_nodes > 1:
            raise ValueError(
                f"`chief_ip` must be given with several nodes, but got None for {num_nodes} nodes."
                " Hint: pass the address of rank 0's node, or set MASTER_ADDR."
            )
        chief_ip = LOOPBACK
    if chief_port is None:
        raise ValueError(
            "`chief_port` must be given with several ranks, but got None. Hint: pass one free"
            " port, the same on all ranks."
        )
    return chief_ip, chief_port
