"""Footers from the registry, in both versions of their format, beside the same footers from storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.asked import Asked, Say
from bench.measure import Side, compare
from bench.places import Ground
from bench.report import Result
from lakebook.lake.footer_store import load_footer, read_footer
from lakebook.lake.footers import _STOP, _field, _header, _skip, open_footer, strip_column_index_info
from lakebook.lake.lake import Lake
from lakebook.registry.footers import FORMAT_VERSION, insert_footers, replace_footer
from lakebook.registry.transactions import Transaction

#: Columns and row groups.
_SHAPES = {"small": (5, 1), "large": (500, 100)}
_QUICK_SHAPES = {"small": (5, 1), "large": (100, 20)}
_ROWS_PER_GROUP = 10
_NUM_ROWS = 3


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Load and parse: the registry's footer, and the one at the end of the file."""
    with ground.new(1, "footers") as place:
        lake = place.open().lake
        for name, (columns, groups) in (_QUICK_SHAPES if asked.quick else _SHAPES).items():
            say(f"footers: {name}")
            rows = groups * _ROWS_PER_GROUP
            paths = {version: f"{name}-{version}.parquet" for version in (1, FORMAT_VERSION)}
            sizes = {version: _write(lake, path, columns, groups, version) for version, path in paths.items()}
            for version, path in paths.items():
                size = sizes[version]
                ours = _repeated(lambda: load_footer(lake, path, rows).open(path))  # noqa: B023 - called at once
                peer = _repeated(lambda: open_footer(read_footer(lake.store, path, size), on=path))  # noqa: B023
                found = compare(ours, peer, asked.effort)
                title = f"{name} footer of format version {version}, {columns} columns, {groups} row groups"
                yield Result(title, ground.kind, columns * groups, 1 / found.ours, 1 / found.peer, unit="calls/s")


def _write(lake: Lake, path: str, columns: int, groups: int, version: int) -> int:
    """Write a file, and enter its footer in a version of the format; the size of the file."""
    values = pa.array(range(groups * _ROWS_PER_GROUP), pa.int64())
    table = pa.table({f"column_{number}": values for number in range(columns)})
    with lake.store.create(path) as stream:
        # With page indexes, whose pointers version 2 leaves out.
        pq.write_table(table, stream, row_group_size=_ROWS_PER_GROUP, write_page_index=True)
    size = lake.store.size(path)
    assert size is not None
    footer = read_footer(lake.store, path, size)

    def enter(transaction: Transaction) -> None:
        insert_footers(transaction, [(path, strip_column_index_info(footer), table.num_rows, size)])
        if version != FORMAT_VERSION:
            replace_footer(transaction, path, FORMAT_VERSION, _without_num_rows(footer), version, None)

    lake.registry.write(enter)
    return size


def _without_num_rows(footer: bytes) -> bytes:
    """A footer as version 1 had it."""
    kept = bytearray()
    position = number = previous = 0
    while True:
        kind, number, position = _field(footer, position, number)
        if kind == _STOP:
            return bytes(kept) + b"\0"
        end = _skip(footer, position, kind)
        if number != _NUM_ROWS:
            kept += _header(kind, number, previous) + footer[position:end]
            previous = number
        position = end


def _repeated(call: Callable[[], Any]) -> Side:
    def run(times: Any) -> None:
        for _ in times:
            call()

    return Side(run, range)
