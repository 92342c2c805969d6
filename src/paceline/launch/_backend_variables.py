"""What the workers of a back end get besides the variables of torch.distributed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from paceline.launch._launcher_arguments import LaunchArgumentError, LaunchOptions
from paceline.workers import WorkerVariables


class Backend:
    """A back end of the launcher; this one needs nothing more than torch.distributed.

    Override `open` in back ends that do.

    Args:
        launcher: The name of the launcher's module.
    """

    def __init__(self, launcher: str) -> None:
        self.launcher = launcher

    @contextmanager
    def open(self, options: LaunchOptions) -> Iterator[WorkerVariables]:
        """Yield what returns the variables of the workers, for as long as they run.

        Raises:
            LaunchArgumentError: The back end cannot do what the options ask for.
        """
        yield lambda layout: ()


def check_installed(package: str, launcher: str, hint: str) -> None:
    """Check that a package can be imported, without importing it.

    Raises:
        LaunchArgumentError: It cannot.
    """
    if find_spec(package) is None:
        raise LaunchArgumentError(
            f"`paceline.launch.{launcher}` needs the package `{package}`, which is not installed."
            f" Hint: {hint}; see docs/backends.md."
        )
