"""Start one worker per slot on this node: `python3 -m paceline.launch.torch_distributed`."""

__all__: list[str] = []
