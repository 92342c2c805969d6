"""Machinery shared by the training front doors: engine, workers, display, searches.

Also: search without a master.
"""
