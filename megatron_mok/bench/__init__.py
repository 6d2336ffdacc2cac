"""Measurements: the same training under two dispatchers (`ab`), one layer against its peers (`layer`)."""
