"""Run the command as `python -m paceline.cli`."""

from paceline.cli._app import main

main()
