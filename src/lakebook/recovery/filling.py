"""Rows of files for a registry that is rebuilt, with what only their bytes tell: footers, statistics, checksums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from lakebook.clock import to_datetime
from lakebook.errors import LakebookError
from lakebook.iceberg.arrow_files import has_field_ids
from lakebook.lake.attempts import DATA
from lakebook.lake.footer_statistics import FileStatistics
from lakebook.lake.footer_store import read_footer, read_footers
from lakebook.lake.footers import open_footer
from lakebook.lake.measuring import PARQUET
from lakebook.names import MAX_NAME
from lakebook.recovery.claims import DAMAGED, Claim
from lakebook.recovery.streams import FoundTopic
from lakebook.recovery.tables import Rebuilt
from lakebook.registry import schema
from lakebook.registry.file_stats import ColumnStats, insert_stats
from lakebook.registry.footers import insert_footers
from lakebook.registry.rebuilding import Filling
from lakebook.registry.registry import Registry
from lakebook.registry.stream_folders import TOPICS
from lakebook.registry.tables import TableMetadata
from lakebook.storage.answers import NO_ANSWER, ObjectInfo
from lakebook.storage.objects import ObjectStore

Row = dict[str, Any]

_AT_ONCE = 200
_TIMES = ("last_modified", "created_at", "updated_at")
# How ids begin that are made of whole paths.
_BY_PATH = "path-"


class TableFiller:
    """Fills in tables, one after the other."""

    def __init__(
        self,
        fill: Filling,
        registry: Registry,
        store: ObjectStore,
        objects: Mapping[str, ObjectInfo],
        used: set[str],
        now: int,
    ) -> None:
        self._fill = fill
        self._registry = registry
        self._store = store
        self._objects = objects
        self._used = used
        self._now = now
        self.unknown: list[str] = []

    def fill(self, table: Rebuilt, progress: Callable[[int], None] = lambda files: None) -> None:
        """Fill in a table, its history, its files and what it is published as.

        `progress` hears now and then how many more files were filled in.
        """
        fill, ident = self._fill, table.table["id"]
        fill.insert(schema.tables, [table.table])
        fill.insert(schema.table_metadata, table.metadata)
        totals = {name: table.table[name] for name in ("row_count", "deleted_rows", "file_count", "total_size")}
        fill.insert(schema.table_stats, [{"id": None, "table_id": ident, **totals, **dict.fromkeys(_TIMES, self._now)}])
        fill.insert(
            schema.table_horizons,
            [{"table_id": ident, "min_readable": table.min_readable, "updated_at": self._now}],
        )
        fill.insert(schema.table_versions, [table.versions[version] for version in sorted(table.versions)])
        self._fill_files(table, progress)
        self._fill_published(table)

    def _fill_files(self, table: Rebuilt, progress: Callable[[int], None]) -> None:
        states = [_state(row) for row in table.metadata]
        statistics = FileStatistics(states)
        for start in range(0, len(table.files), _AT_ONCE):
            rows = table.files[start : start + _AT_ONCE]
            there = [row for row in rows if row["file_path"] in self._objects]
            self._take_checksums([row for row in there if not row["checksum"]])
            footers_of = _footers(
                self._store,
                [
                    (row["file_path"], self._objects[row["file_path"]].size)
                    for row in there
                    if row["file_type"] == PARQUET
                ],
            )
            taken = [self._taken(table, statistics, row, footers_of.get(row["file_path"])) for row in there]
            self._fill.insert(schema.table_files, rows)
            footers = {
                row["file_path"]: (row["file_path"], footer, row["row_count"], row["file_size"])
                for row, (footer, _) in zip(there, taken, strict=True)
                if footer is not None and row["file_path"] not in self._used
            }
            stats = [(row["id"], found) for row, (_, found) in zip(there, taken, strict=True)]

            def work(transaction: Any) -> None:
                insert_footers(transaction, footers.values())  # noqa: B023 - called at once
                insert_stats(transaction, table.table["id"], stats)  # noqa: B023

            self._registry.write(work)
            self._used |= {row["file_path"] for row in there}
            progress(len(rows))

    def _take_checksums(self, rows: Sequence[Row]) -> None:
        for row, checksum in zip(rows, _checksums(self._store, [row["file_path"] for row in rows]), strict=True):
            row["checksum"] = checksum or ""

    def _taken(
        self, table: Rebuilt, statistics: FileStatistics, row: Row, footer: bytes | None
    ) -> tuple[bytes | None, tuple[ColumnStats, ...]]:
        """The footer and the statistics of a file; what they tell is put into its row."""
        row["has_statistics"] = False
        path = row["file_path"]
        if row["file_type"] != PARQUET:
            return None, ()
        try:
            if footer is None:
                footer = read_footer(self._store, path, self._objects[path].size)
            opened = open_footer(footer, on=path)
            columns = opened.schema.to_arrow_schema()
            row["row_groups"] = opened.num_row_groups
            row["has_field_ids"] = has_field_ids(columns)
            groups = range(opened.num_columns if opened.num_row_groups else 0)
            row["is_compressed"] = any(
                opened.row_group(0).column(number).compression != "UNCOMPRESSED" for number in groups
            )
            if row["content"] != 0:
                return footer, ()
            ours = path.startswith((f"{DATA}/", f"{TOPICS}/"))
            stats, complete = statistics.of(row, opened, columns, ours=ours, nans=table.nans.get(row["id"]))
        except NO_ANSWER:
            raise
        except LakebookError as error:
            self.unknown.append(f"its file {path} cannot be read ({error.what})")
            return None, ()
        except DAMAGED as error:
            self.unknown.append(f"its file {path} cannot be read ({type(error).__name__})")
            return None, ()
        row["has_statistics"] = complete
        return footer, stats

    def _fill_published(self, table: Rebuilt) -> None:
        recovered, ident, fill = table.recovered, table.table["id"], self._fill
        if recovered is None or table.pointer is None:
            return
        fill.insert(schema.iceberg_tables, [table.pointer])
        fill.insert(
            schema.table_snapshots,
            [
                {"table_id": ident, **vars(snapshot), "summary": dict(snapshot.summary)}
                for snapshot in recovered.snapshots
            ],
        )
        fill.insert(
            schema.iceberg_files,
            [{"table_id": ident, **vars(file), "added_at": self._now} for file in recovered.metadata_files],
        )
        fill.insert(
            schema.snapshot_manifests,
            [
                {"table_id": ident, "snapshot_id": snapshot, "file_path": path}
                for snapshot, paths in recovered.listings.items()
                for path in paths
            ],
        )
        fill.insert(
            schema.branch_files,
            [
                {"file_path": path, "table_id": ident, "file_size": size, "added_at": self._now}
                for path, size in recovered.branch_files.items()
            ],
        )
        self._used |= {file.file_path for file in recovered.metadata_files} | recovered.branch_files.keys()


def _state(row: Row) -> TableMetadata:
    values: dict[str, Any] = {name: value for name, value in row.items() if name != "id"}
    return TableMetadata(**values | {name: to_datetime(values[name]) for name in _TIMES})


def _footers(store: ObjectStore, files: Sequence[tuple[str, int]]) -> dict[str, bytes]:
    """The footers of files, several at a time; none of them if one cannot be read."""
    try:
        return dict(zip((path for path, _ in files), read_footers(store, files), strict=True))
    except NO_ANSWER:
        raise
    except LakebookError:
        return {}


def _checksums(store: ObjectStore, paths: Sequence[str]) -> list[str | None]:
    """The checksums of files; none of one that cannot be read."""
    if not paths:
        return []
    try:
        return [item.checksum for item in store.measure(paths)]
    except NO_ANSWER:
        raise
    except LakebookError:
        pass
    found: list[str | None] = []
    for path in paths:
        try:
            found.append(store.checksum(path))
        except NO_ANSWER:
            raise
        except LakebookError:
            found.append(None)
    return found


# --- segments ------------------------------------------------------------------


def segment_ids(topics: Iterable[FoundTopic]) -> dict[str, str]:
    """The ids of segments by their paths: their files' names, which nobody else has.

    Those that were recorded by hand may be called alike: they are known by their whole paths then.
    """
    names = {claim.path: _name_of(claim.path) for topic in topics for claim in topic.chosen}
    often = Counter(names.values())
    return {
        # Nor may a name be what another is given.
        path: name if often[name] == 1 and _is_id(name) and not name.startswith(_BY_PATH) else _id_by(path)
        for path, name in names.items()
    }


def _name_of(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".parquet")


def _is_id(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable()


def _id_by(path: str) -> str:
    return f"{_BY_PATH}{xxhash.xxh3_128_hexdigest(path.encode('utf-8', 'surrogatepass'))}"


def fill_segments(
    fill: Filling,
    registry: Registry,
    store: ObjectStore,
    topics: Iterable[FoundTopic],
    bucket: str,
    commit_id: str,
    ids: Mapping[str, str],
    with_footer: set[str],
    progress: Callable[[int, str], None] = lambda segments, topic: None,
) -> None:
    """Fill in the segments of topics, by their `ids`. `with_footer` has the paths whose footers are there already.

    `progress` hears now and then how many more were filled in, and of which topic.
    """
    for topic in topics:
        for partition in topic.partitions.values():
            newest = 0
            for some in _chunks(partition.settled.chosen):
                checksums = _checksums(store, [claim.path for claim in some])
                rows: list[Row] = []
                for claim, checksum in zip(some, checksums, strict=True):
                    newest = max(newest, claim.max_timestamp) if rows or newest else claim.max_timestamp
                    rows.append({"id": ids[claim.path], **_segment(claim, checksum, bucket, commit_id, newest)})
                fill.insert(schema.segments, rows)
                wanted = [claim for claim in some if claim.path not in with_footer]
                read = read_footers(store, [(claim.path, claim.size) for claim in wanted])
                footers = [
                    (claim.path, footer, claim.count, claim.size) for claim, footer in zip(wanted, read, strict=True)
                ]
                registry.write(lambda transaction: insert_footers(transaction, footers))  # noqa: B023 - called at once
                progress(len(some), f"filling topic {topic.name}")


def _chunks(claims: Sequence[Claim]) -> Iterator[Sequence[Claim]]:
    return (claims[start : start + _AT_ONCE] for start in range(0, len(claims), _AT_ONCE))


def _segment(claim: Claim, checksum: str | None, bucket: str, commit_id: str, newest: int) -> Row:
    batch = claim.batch is not None and claim.last_sequence is not None
    return {
        "topic_id": claim.topic_id,
        "partition_id": claim.partition,
        "base_offset": claim.base,
        "end_offset": claim.end - 1,
        "record_count": claim.count,
        "size_bytes": claim.size,
        "s3_bucket": bucket,
        "s3_key": claim.path,
        "checksum": checksum,
        "min_timestamp": claim.min_timestamp,
        "max_timestamp": claim.max_timestamp,
        "newest_timestamp": newest,
        "commit_id": commit_id,
        "producer_id": claim.producer_id if batch else None,
        "producer_epoch": claim.producer_epoch if batch else None,
        "first_sequence": claim.first_sequence if batch else None,
        "last_sequence": claim.last_sequence if batch else None,
        "created_at": claim.modified,
    }
