"""Starters: what starts the runners of nodes on the machines of a pool, when trials wait."""
