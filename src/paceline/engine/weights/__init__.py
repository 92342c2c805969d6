"""Weights of models from and for the files of other programs."""
