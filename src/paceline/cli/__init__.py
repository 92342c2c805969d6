"""The `paceline` command."""

from paceline.cli._app import app, main

__all__ = ["app", "main"]
