"""Batches and loaders, by the names that trials know them by."""

from torch.utils.data import DataLoader as DataLoader

from paceline.engine import TorchData as TorchData
from paceline.engine import data_length as data_length
from paceline.engine import to_device as to_device
