"""Ground floor: journals, run directories, files.

GPUs and small parts that know nothing of training.
"""
