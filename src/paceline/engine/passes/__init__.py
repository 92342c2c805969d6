"""Passes over data that a driver calls one by one, their statistics, and their state."""
