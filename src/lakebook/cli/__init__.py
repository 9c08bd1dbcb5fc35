"""The command line: the only part of Lakebook that prints."""
