"""Versions that the nodes of a Ray cluster must share with the driver."""

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from paceline.workers._errors import NodesDifferError

COMPARED = ("paceline", "torch")


def check_versions(told: Sequence[Mapping[str, Any]]) -> None:
    """Check what the actors of nodes have said of theirs.

    Raises:
        NodesDifferError: A node has others than this process.
    """
    own = own_versions()
    for facts in told:
        found = version_differences(own, facts["versions"])
        if found:
            raise NodesDifferError(
                f"All nodes must have the driver's versions, but node {facts['address']} has"
                f" {', '.join(found)}. Hint: install the same versions on all nodes."
            )


def own_versions() -> dict[str, str]:
    """Return the versions of this process that those of the nodes must agree with."""
    versions = {name: metadata.version(name) for name in COMPARED}
    return {"Python": platform.python_version(), **versions}


def version_differences(own: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return one phrase for each version that differs from the driver's."""
    return [
        f"{name} {theirs.get(name, 'none')} instead of {version}"
        for name, version in own.items()
        if _public(name, theirs.get(name, "none")) != _public(name, version)
    ]


def _public(name: str, version: str) -> str:
    """Return what of a version must agree: not the kind of build, nor Python's bug-fix release."""
    if name == "Python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]
