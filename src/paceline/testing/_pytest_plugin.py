"""Plugin of pytest: tests that verify how a command resumes, run with `--verify-resume`."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.testing._verify_command import CommandVerdict

_MARKER = "verify_resume"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--verify-resume`."""
    parser.getgroup("paceline").addoption(
        "--verify-resume", action="store_true", help="Run the tests marked `verify_resume`."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(*command, **options): the command of `resume_verdict`, with the options of"
        " `paceline.testing.verify_command`; runs with --verify-resume only",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip marked tests without the option: each runs a training three times."""
    if not config.getoption("--verify-resume"):
        for item in items:
            if item.get_closest_marker(_MARKER) is not None:
                item.add_marker(pytest.mark.skip(reason="needs --verify-resume"))


@pytest.fixture
def resume_verdict(request: pytest.FixtureRequest, tmp_path: "Path") -> "CommandVerdict":
    """Return the verdict on the command of the test's marker; skip what is not supported."""
    # Late import: the plugin is loaded in each session of pytest.
    from paceline.testing._verify_command import verify_command

    marker = request.node.get_closest_marker(_MARKER)
    if marker is None:
        pytest.fail("`resume_verdict` needs the marker `verify_resume(*command)`.")
    verdict = verify_command(marker.args, directory=tmp_path / "runs", **marker.kwargs)
    if verdict.result == "not supported":
        pytest.skip(str(verdict))
    if verdict.result in ("nothing resumable", "could not run"):
        pytest.fail(str(verdict), pytrace=False)
    return verdict
