"""``python -m paceline._cluster.runner ATTEMPT_DIRECTORY [--ship]``."""

import argparse
import logging
import os
from pathlib import Path

from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_run import run_attempt, ship_attempt
from paceline._training.workers.processes.template_client import Template


def main() -> None:
    """Run an attempt, or ship an earlier runner's leftovers."""
    parser = argparse.ArgumentParser(prog="paceline._cluster.runner")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()
    directory = AttemptDirectory(options.directory)
    # First of all: the template must know nothing of the attempt.
    template = None if options.ship else Template.split_off()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")
    try:
        if options.ship:
            ship_attempt(directory)
        else:
            run_attempt(directory, template)
    except Exception:
        logging.getLogger(__name__).exception("The runner has failed.")
        raise SystemExit(1) from None
    if template is not None:
        # Without cleanup: a forked runner's resources need no tidying.
        logging.shutdown()
        os._exit(0)


if __name__ == "__main__":
    main()
