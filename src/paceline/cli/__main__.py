"""Run the command as `python -m paceline.cli`."""

from paceline.cli import main

main()
