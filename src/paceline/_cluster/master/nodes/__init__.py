"""Nodes: machines with a runner to register, ask for attempts and run the attempts."""
