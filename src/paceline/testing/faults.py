"""`paceline.faults` by its earlier name."""

from paceline.faults import (
    FAULT_LOG_VARIABLE,
    FAULT_VARIABLE,
    is_active,
    points,
    reach,
    register,
)

__all__ = ["FAULT_LOG_VARIABLE", "FAULT_VARIABLE", "is_active", "points", "reach", "register"]
