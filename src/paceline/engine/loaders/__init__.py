"""Reading data: the order of samples, and the part of each rank in loaders and streams."""
