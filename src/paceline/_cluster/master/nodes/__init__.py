"""Nodes: machines whose runners register, ask for attempts and carry them out."""
