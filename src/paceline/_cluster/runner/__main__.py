"""``python -m paceline._cluster.runner ATTEMPT_DIRECTORY [--ship]``, or ``--host DESCRIPTOR``."""

import argparse
import logging
from pathlib import Path

from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_run import run_attempt, ship_attempt


def main() -> None:
    """Run an attempt, ship an earlier runner's leftovers, or fork runners on request."""
    parser = argparse.ArgumentParser(prog="paceline._cluster.runner")
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--ship", action="store_true")
    parser.add_argument("--host", type=int, metavar="DESCRIPTOR")
    options = parser.parse_args()
    if options.host is not None:
        _serve(options.host)
    elif options.directory is None:
        parser.error("The directory of an attempt must be given.")
    else:
        _run(options.directory, is_shipping=options.ship)


def _serve(control: int) -> None:
    from paceline._cluster.runner.runner_fork_server import leave_forked_runner, serve_runners

    try:
        wanted = serve_runners(control)
    except ConnectionError:
        # The master was killed while it waited for an answer.
        return
    if wanted is None:
        return
    try:
        _run(wanted[0], is_shipping=wanted[1])
    except Exception:
        logging.getLogger(__name__).exception("The runner has failed.")
    finally:
        leave_forked_runner()


def _run(path: Path, *, is_shipping: bool) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")
    directory = AttemptDirectory(path)
    if is_shipping:
        ship_attempt(directory)
    else:
        run_attempt(directory)


if __name__ == "__main__":
    main()
