"""Starters: start the runners of nodes on the machines of a pool for waiting trials."""
