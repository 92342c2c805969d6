"""The REST API."""

from paceline.master.api._access_guard import PUBLIC_PATHS
from paceline.master.api._api_app import create_app, describe
from paceline.master.api._scopes import PREFIX

__all__ = ["PREFIX", "PUBLIC_PATHS", "create_app", "describe"]
