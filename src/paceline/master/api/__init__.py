"""The REST API."""

from paceline.master.api._app import PREFIX, create_app, describe
from paceline.master.api._auth import PUBLIC_PATHS

__all__ = ["PREFIX", "PUBLIC_PATHS", "create_app", "describe"]
