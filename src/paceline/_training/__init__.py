"""Machinery of training that the front doors share: engine, workers, display.

Also: search without a master.
"""
