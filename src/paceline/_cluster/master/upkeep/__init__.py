"""Upkeep of a home: backups, and checks of its content."""
