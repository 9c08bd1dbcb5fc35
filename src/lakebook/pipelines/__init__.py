"""Pipelines: from topics or tables into a table, exactly once."""
