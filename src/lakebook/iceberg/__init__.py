"""What Apache Iceberg defines, and tables as Iceberg; the only room that imports PyIceberg.

`LakebookCatalog` is what PyIceberg, and whoever speaks through it, reaches a book by.
"""

from typing import Any

__all__ = ["LakebookCatalog"]


def __getattr__(name: str) -> Any:
    # PyIceberg takes long to import; schemas and bounds are needed without its catalogs.
    if name == "LakebookCatalog":
        from lakebook.iceberg.catalog import LakebookCatalog

        return LakebookCatalog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
