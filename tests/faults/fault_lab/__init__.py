"""Faults for whole Paceline masters: failing calls, kills and power losses, and what must hold."""
