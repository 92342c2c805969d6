"""When something is due: units of training, periods, the end, learning-rate schedules."""
