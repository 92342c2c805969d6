"""Train PyTorch models from a notebook to a cluster without rewriting the script."""
