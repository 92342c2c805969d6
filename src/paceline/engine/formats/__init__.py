"""Formats of values in files: JSON and safetensors, values without pickle, versions."""
