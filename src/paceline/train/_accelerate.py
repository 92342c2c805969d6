"""A name that models have which were pickled as a whole by earlier versions."""

from paceline.engine import unwrapped_forward

_same = unwrapped_forward
