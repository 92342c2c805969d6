"""Run as ``python3 -m paceline.declarative run.yaml``."""

import sys

from paceline.declarative._run_yaml import RunFileError, main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RunFileError, FileNotFoundError) as error:
        sys.exit(f"paceline.declarative: error: {error}")
