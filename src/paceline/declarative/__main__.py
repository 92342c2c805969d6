"""Run as ``python3 -m paceline.declarative run.yaml``."""

import sys

from paceline.declarative._trainer_and_tester import is_explained, main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        if not is_explained(error):
            raise
        sys.exit(f"paceline.declarative: error: {error}")
