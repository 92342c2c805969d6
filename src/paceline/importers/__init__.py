"""Importers of what other trackers have logged, into run directories."""
