"""Keeping a home: backups of it, and checks of what is in it."""
