"""The lake: tables, their data files, and the footers of those files."""
