"""Measures of the library against the bare driver and against other engines, on one machine in one run."""
