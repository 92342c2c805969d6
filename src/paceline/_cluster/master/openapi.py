"""Print the description of the REST API: `python -m paceline._cluster.master.openapi [FILE]`."""

import json
import sys
from pathlib import Path

from paceline._cluster.master.api.application import describe


def main() -> None:
    """Write the OpenAPI document to the file named, else to the standard output."""
    text = json.dumps(describe(), indent=1) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
