"""Launchers of a worker per slot on this node, as `paceline.launch.torch_distributed`."""

__all__: list[str] = []
