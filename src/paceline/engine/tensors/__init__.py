"""Tensors: sharded over ranks, stored in files, copied in memory."""
