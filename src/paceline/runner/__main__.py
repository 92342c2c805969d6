"""``python -m paceline.runner ATTEMPT_DIRECTORY [--ship]``: started by the master."""

import argparse
import logging
from pathlib import Path

from paceline.runner._directory import AttemptDirectory
from paceline.runner._run import run_attempt, ship_attempt


def main() -> None:
    """Run an attempt, or ship what an earlier runner left."""
    parser = argparse.ArgumentParser(prog="paceline.runner")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")
    directory = AttemptDirectory(options.directory)
    if options.ship:
        ship_attempt(directory)
    else:
        run_attempt(directory)


if __name__ == "__main__":
    main()
