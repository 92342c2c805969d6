"""Ground floor: journals, run directories, files, GPUs and parts independent of training.

GPUs and small parts that know nothing of training.
"""
