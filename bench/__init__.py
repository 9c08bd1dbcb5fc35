"""Measures of the library against the bare driver, in one process on one machine."""
