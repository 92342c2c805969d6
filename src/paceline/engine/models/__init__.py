"""Preparing a model: options, weights for the meta device, bases that are not trained."""
