"""The build hook of wheel and sdist: both carry the web UI and the documentation.

webui/scripts/build.py builds the one, docs/site/build.py the other.
"""

import inspect
import os
import platform
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

SKIP_VARIABLE = "PACELINE_SKIP_WEBUI"
REGISTRY = "https://registry.npmjs.org/"
REGISTRY_TIMEOUT_S = 10
SCRIPTS = Path(__file__).resolve().parent / "webui" / "scripts"
DOCS_SCRIPT = Path(__file__).resolve().parent / "docs" / "site" / "build.py"
# What makes the pages, and what the reference is read from, beside the package's dependencies.
DOCS_MODULES = ("zensical", "griffe", "markdown_it", "typer", "fastapi", "pydantic", "sqlalchemy")


class WebUiHook(BuildHookInterface):  # type: ignore[type-arg]
    """Build the web UI before the archive is written."""

    def dependencies(self) -> list[str]:
        """Return the package with Node, if it is needed for the build and of use."""
        # Hatchling asks in the same way for all kinds of build; the name is that of PEP 660.
        is_editable = any(
            frame.function == "get_requires_for_build_editable" for frame in inspect.stack(0)
        )
        if is_editable or is_skipped() or is_up_to_date() or has_node():
            return []
        # Without a built package pip would compile Node; without the registry Node has no use.
        return node_requirement() if is_node_built_for_here() and is_registry_there() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the web UI and add it to the archive, or say why it is left out."""
        if version == "editable":
            self.app.display_info(
                "Editable installs show the web UI that `make ui` builds, and the documentation"
                " that `make docs` builds."
            )
            return
        self.add_documentation(build_data)
        if not is_up_to_date() and (obstacle := build()):
            self.app.display_warning(
                f"The web UI is left out: {obstacle}. Hint: run `make ui` in the source directory,"
                " then build or install again."
            )
            return
        # Git ignores it.
        build_data["artifacts"].append("/src/paceline/_cluster/master/webui/**")

    def add_documentation(self, build_data: dict[str, Any]) -> None:
        """Add the documentation to the archive, or say why it is left out."""
        if obstacle := build_documentation():
            self.app.display_warning(
                f"The documentation is left out: {obstacle}. Hint: run `make docs` in the source"
                " directory, then build or install again."
            )
            return
        build_data["artifacts"].append("/src/paceline/_cluster/master/docs/**")


def is_skipped() -> bool:
    """Tell whether the web UI is not to be built."""
    return os.environ.get(SKIP_VARIABLE, "0") not in ("", "0")


def is_up_to_date() -> bool:
    """Tell whether the web UI was built from this source."""
    return call(sys.executable, SCRIPTS / "build.py", "--check") == 0


def build_documentation() -> str | None:
    """Build the documentation unless it is up to date; return what stands in the way."""
    if call(sys.executable, DOCS_SCRIPT, "--check") == 0:
        return None
    # They are many, and torch is among the package's own: no build installs them for these pages.
    if missing := [name for name in DOCS_MODULES if find_spec(name) is None]:
        return f"it was not built from this source, and building it needs {', '.join(missing)}"
    # Standard output belongs to who builds a package.
    command = [sys.executable, DOCS_SCRIPT]
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    return f"its build failed with status {status}" if status else None


def has_node() -> bool:
    """Tell whether npm can run, by the machine's Node or the package's."""
    return call("sh", SCRIPTS / "npm.sh", sys.executable, "--version") == 0


def build() -> str | None:
    """Build the web UI; return what stands in the way, if something does."""
    if is_skipped():
        return f"`{SKIP_VARIABLE}` is set"
    if not has_node():
        return "there is no Node 20.19 or later to build it"
    status = subprocess.run([sys.executable, SCRIPTS / "build.py"], check=False).returncode
    return f"its build failed with status {status}" if status else None


def node_requirement() -> list[str]:
    """Return the requirement for the package with Node."""
    lines = (SCRIPTS / "node.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def is_node_built_for_here() -> bool:
    """Tell whether the package with Node is built for this system."""
    tags = {tag.platform for tag in sys_tags()}
    machine = platform.machine()
    libraries = (f"manylinux_2_28_{machine}", f"musllinux_1_2_{machine}", f"macosx_13_0_{machine}")
    return machine in ("x86_64", "aarch64", "arm64") and not tags.isdisjoint(libraries)


def is_registry_there() -> bool:
    """Tell whether npm's registry can be reached."""
    registry = os.environ.get("npm_config_registry", REGISTRY)  # noqa: SIM112 - npm reads it so
    request = urllib.request.Request(registry, method="HEAD")  # noqa: S310 - npm's own address
    try:
        urllib.request.urlopen(request, timeout=REGISTRY_TIMEOUT_S).close()  # noqa: S310
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # npm has certificates of its own.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    return True


def call(*command: str | Path) -> int:
    """Run a command silently, and return its exit status."""
    return subprocess.run(command, capture_output=True, check=False).returncode
