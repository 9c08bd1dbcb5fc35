"""A table from its Iceberg metadata and the checkpoint: rows for the registry, and what could not be known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lakebook.clock import to_ms
from lakebook.iceberg.numbering import KnownVersions
from lakebook.iceberg.publishing import SHOWN_BY
from lakebook.iceberg.recovering import RecoveredFile, RecoveredTable, RecoveredVersion, Shape
from lakebook.names import decimal_in
from lakebook.registry.schema import MAX_BIGINT
from lakebook.registry.tables import empty_table
from lakebook.storage.answers import ObjectInfo

Row = dict[str, Any]

_OPERATIONS = ("append", "overwrite", "delete", "replace")
# Properties that the metadata always has, whoever gave them.
_NOT_TOLD = ("gc.enabled", "write.parquet.compression-codec")
_NO_FILES_CHANGED = ("create", "schema")


@dataclass
class Known:
    """What the checkpoint says of a table."""

    table: Row
    metadata: list[Row] = field(default_factory=list)
    min_readable: int = 0
    pointer: Row | None = None
    versions: dict[int, Row] = field(default_factory=dict)
    snapshots: dict[int, tuple[int | None, int, bool]] = field(default_factory=dict)
    #: Files that its published metadata does not list, or that it lists though they were ended.
    files: list[Row] = field(default_factory=list)

    def said(self, first: str) -> KnownVersions:
        """Its versions, for who reads its metadata from some file on."""
        pointer = self.pointer
        return KnownVersions(
            self.table["version"],
            pointer["version"] if pointer is not None and pointer["metadata_location"] == first else None,
            self.snapshots,
            {row["commit_id"]: version for version, row in self.versions.items()},
            {version: _shown_by(row) for version, row in self.versions.items() if SHOWN_BY in (row["summary"] or {})},
            frozenset(_shape_ids(row)[0] for row in self.metadata),
            _shape_ids(self.metadata[-1]) if self.metadata else None,
        )


@dataclass
class Rebuilt:
    """A table as the registry will have it."""

    table: Row
    metadata: list[Row]
    versions: dict[int, Row]
    min_readable: int
    #: Files by their rows in `table_files`, without what their bytes tell.
    files: list[Row]
    #: How many values of a column are NaN, by file: no footer tells.
    nans: dict[int, Mapping[int, int]]
    recovered: RecoveredTable | None
    pointer: Row | None
    gaps: list[tuple[int, int]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    #: Its version at the checkpoint.
    known_version: int = 0
    #: Whether it is newer than the checkpoint.
    is_newer: bool = False
    #: Whether it goes on from a state before the checkpoint: what came after that is lost.
    went_back: bool = False

    @property
    def live(self) -> list[Row]:
        """The files of its newest version."""
        return [row for row in self.files if row["to_version"] is None]

    @property
    def changed(self) -> list[Row] | None:
        """Files that have come or gone since the checkpoint; none if not all of them are known."""
        known = self.known_version
        if known not in self.versions:
            return None
        return [row for row in self.files if row["from_version"] > known or (row["to_version"] or 0) > known]


def rebuild_table(
    known: Known, recovered: RecoveredTable | None, there: Mapping[str, ObjectInfo], commit_id: str, now: int
) -> Rebuilt:
    """Put a table together; `there` has the objects of the warehouse by their paths."""
    result = Rebuilt(
        dict(known.table),
        [dict(row) for row in known.metadata],
        {},
        known.min_readable,
        [],
        {},
        recovered,
        None,
    )
    work = _Work(known, recovered, there, commit_id, now, result)
    work.run()
    return result


def made_known(recovered: RecoveredTable, ident: int, namespace_id: int, name: str, object_id: int, now: int) -> Known:
    """What is said of a table that only its own metadata knows."""
    oldest = recovered.versions[0].version if recovered.versions else 0
    fields = recovered.last_field_id
    table = {"id": ident, **empty_table(object_id, namespace_id, name, recovered.table_uuid, "parquet", fields, now)}
    known = Known(table, [], oldest)
    said = (version.schema_id for version in recovered.versions)
    used = [schema_id for schema_id in said if schema_id is not None and schema_id in recovered.schemas]
    wanted = [*dict.fromkeys(used), *(ident for ident in recovered.schemas if ident not in used)]
    wanted = [ident for ident in wanted if ident != recovered.current.ids[0]]
    specs = [spec for ident, spec in recovered.specs.items() if ident != recovered.current.ids[1]]
    shapes = [Shape(recovered.schemas[ident], recovered.current.spec, recovered.current.order) for ident in wanted]
    shapes += [Shape(recovered.current.schema, spec, recovered.current.order) for spec in specs]
    for number, shape in enumerate([*shapes, recovered.current], 1):
        known.metadata.append(_metadata_row(table, recovered, shape, number, 0, now))
    table["schema_version"] = len(known.metadata)
    return known


def _metadata_row(
    table: Row, recovered: RecoveredTable, shape: Shape, schema_version: int, from_version: int, now: int
) -> Row:
    return {
        "id": None,
        "table_id": table["id"],
        "schema_version": schema_version,
        "from_version": from_version,
        "schema": dict(shape.schema),
        "storage_engine": "spark",
        "engine_config": {},
        "format": "parquet",
        "compression": recovered.compression,
        "partition_by": dict(shape.spec),
        "sort_by": dict(shape.order),
        "properties": dict(recovered.properties),
        "last_modified": now,
        "created_at": now,
        "updated_at": now,
    }


class _Work:
    """Puts one table together."""

    def __init__(
        self,
        known: Known,
        recovered: RecoveredTable | None,
        there: Mapping[str, ObjectInfo],
        commit_id: str,
        now: int,
        result: Rebuilt,
    ) -> None:
        self._known = known
        self._recovered = recovered
        self._there = there
        self._commit_id = commit_id
        self._now = now
        self._result = result
        # The versions whose files are known.
        self._readable: set[int] = set()
        # Of versions of which many files ask.
        self._schema_versions: dict[int, int] = {}

    def run(self) -> None:
        known, result = self._known, self._result
        covered = self._take_published() if self._recovered is not None else -1
        newest = known.table["version"]
        if newest > covered and self._follows(covered):
            self._take_unpublished(covered)
            version = newest
        elif newest > covered:
            # Versions are lost in between: what is there goes on under a number that nobody has had.
            result.unknown.append(
                f"versions {covered + 1} to {newest} were made before the checkpoint, and the metadata that lists their"
                " files cannot be read"
            )
            version = newest + 1
            result.went_back = True
            result.versions[version] = self._plain_version(version)
            self._readable.add(version)
            assert result.pointer is not None
            result.pointer["version"] = version
        else:
            version = covered
        result.is_newer, result.known_version = covered > newest, newest
        result.table["version"] = version
        self._settle_versions(version)
        self._settle_files()

    def _follows(self, covered: int) -> bool:
        pointer = self._known.pointer
        return pointer is None or pointer["version"] <= covered

    # --- what was published ----------------------------------------------------------

    def _take_published(self) -> int:
        known, recovered, result = self._known, self._recovered, self._result
        assert recovered is not None
        former = known.pointer
        is_same = former is not None and former["metadata_location"] == recovered.metadata_path
        covered = recovered.version
        for version in recovered.versions:
            self._readable.add(version.version)
        if former is not None and recovered.metadata_number >= former["metadata_number"]:
            # Changes of the schema alone add no snapshot.
            covered = max(covered, former["version"])
        if not is_same and (known.versions or former is not None):
            self._take_shapes()
        properties_at = result.metadata[-1]["updated_at"]
        result.pointer = {
            "table_id": known.table["id"],
            "location": recovered.location,
            "metadata_location": recovered.metadata_path,
            "metadata_number": recovered.metadata_number,
            "snapshot_id": recovered.snapshot_id,
            "last_sequence": recovered.last_sequence,
            "version": covered,
            "properties_at": former["properties_at"] if is_same and former is not None else properties_at,
            "published_at": recovered.updated_ms,
        }
        for version in recovered.versions:
            result.versions[version.version] = self._published_version(version)
        for number in recovered.between & known.versions.keys():
            self._readable.add(number)
        for file in recovered.files:
            result.files.append(self._published_file(file))
            if file.nans:
                result.nans[file.id] = file.nans
        result.table["last_field_id"] = max(known.table["last_field_id"], recovered.last_field_id)
        return covered

    def _take_shapes(self) -> None:
        """Schemas, specs, orders and properties that are newer than the checkpoint."""
        known, recovered, result = self._known, self._recovered, self._result
        assert recovered is not None
        for version, shape, at in recovered.shapes:
            if version <= known.table["version"]:
                continue
            number = result.metadata[-1]["schema_version"] + 1
            row = _metadata_row(known.table, recovered, shape, number, version, recovered.updated_ms)
            kept = ("storage_engine", "engine_config", "format", "compression")
            result.metadata.append({**row, **{name: result.metadata[-1][name] for name in kept}})
            if version not in self._readable:
                result.versions[version] = {
                    **self._plain_version(version),
                    "schema_version": number,
                    "committed_at": at,
                }
                if version - 1 in self._readable:
                    self._readable.add(version)
        newest = result.metadata[-1]
        newest["properties"] = {
            **{key: value for key, value in newest["properties"].items() if key in _NOT_TOLD},
            **recovered.properties,
        }
        result.table["schema_version"] = newest["schema_version"]

    def _published_version(self, version: RecoveredVersion) -> Row:
        row = self._known.versions.get(version.version)
        if row is not None:
            return dict(row)
        if version.is_jump:
            # What its snapshot says is what was changed when that was made.
            shown = "none" if version.snapshot_id is None else str(version.snapshot_id)
            return {
                **self._plain_version(version.version),
                "operation": "delete" if version.snapshot_id is None else "overwrite",
                "schema_version": self._schema_version(version.version),
                "summary": {SHOWN_BY: shown},
                "committed_at": version.timestamp_ms,
            }
        summary = version.summary

        def number(name: str) -> int:
            # Whoever made the snapshot has written it: it may be anything.
            return decimal_in(summary.get(name)) or 0

        return {
            **self._plain_version(version.version),
            "operation": version.operation if version.operation in _OPERATIONS else "append",
            "schema_version": self._schema_version(version.version),
            "added_files": number("added-data-files") + number("added-delete-files"),
            "added_rows": number("added-records"),
            "added_size": number("added-files-size"),
            "removed_files": number("deleted-data-files") + number("removed-delete-files"),
            "removed_rows": number("deleted-records"),
            "removed_size": number("removed-files-size"),
            "committed_at": version.timestamp_ms,
        }

    def _plain_version(self, version: int) -> Row:
        return {
            "table_id": self._known.table["id"],
            "version": version,
            "operation": "schema",
            "schema_version": self._result.metadata[-1]["schema_version"],
            "commit_id": self._commit_id,
            **dict.fromkeys(
                ("added_files", "added_rows", "added_size", "removed_files", "removed_rows", "removed_size"), 0
            ),
            "summary": {},
            "committed_at": self._now,
        }

    def _schema_version(self, version: int) -> int:
        """The state of the schema that a version has."""
        found = self._schema_versions.get(version)
        if found is None:
            found = self._schema_versions[version] = self._found_schema_version(version)
        return found

    def _found_schema_version(self, version: int) -> int:
        row = self._known.versions.get(version)
        if row is not None:
            return int(row["schema_version"])
        states = self._result.metadata
        recovered = self._recovered
        wanted = None
        for item in recovered.versions if recovered is not None else ():
            if item.version >= version:
                wanted = item.schema_id
                break
        if wanted is None:
            # The schema that the table had then, whatever shows its rows.
            early = [row for row in states if row["from_version"] <= version]
            return int((early or states)[-1]["schema_version"])
        fitting = [row for row in states if row["schema"].get("schema-id", 0) == wanted]
        early = [row for row in fitting if row["from_version"] <= version]
        return int((early or fitting or states)[-1]["schema_version"])

    def _published_file(self, file: RecoveredFile) -> Row:
        info = self._there.get(file.path)
        at = to_ms(info.modified) if info is not None else self._now
        parts = file.path.split("/")
        own = len(parts) > 3 and parts[0] == "data"
        return {
            "table_id": self._known.table["id"],
            "id": file.id,
            "file_name": parts[-1],
            "file_path": file.path,
            "file_size": file.size,
            "file_type": "parquet",
            "partition_path": file.partition_path,
            "partition_values": file.partition_values,
            "spec_id": file.spec_id,
            "row_count": file.rows,
            "row_groups": 0,
            "checksum": "",
            "is_compressed": True,
            "schema_version": self._schema_version(file.from_version),
            "has_field_ids": True,
            "has_statistics": False,
            "commit_id": parts[2] if own else self._commit_id,
            "from_version": file.from_version,
            "to_version": file.to_version,
            "created_at": at,
            "modified_at": at,
            "retired_at": None,
            "content": file.content,
            "location": file.location,
            "sequence_number": file.sequence_number,
            "referenced_path": file.referenced_path,
        }

    # --- what only the checkpoint has ------------------------------------------------

    def _take_unpublished(self, covered: int) -> None:
        known, result = self._known, self._result
        live = {row["file_path"]: row for row in result.files if row["to_version"] is None}
        next_id = max((row["id"] for row in result.files), default=0) + 1
        for file in sorted(known.files, key=lambda row: (row["from_version"], row["id"])):
            if file["from_version"] > covered:
                result.files.append({**file, "id": next_id})
                next_id += 1
            elif file["to_version"] is not None and file["to_version"] > covered and file["file_path"] in live:
                live[file["file_path"]]["to_version"] = file["to_version"]
        for version, row in known.versions.items():
            if version > covered:
                self._readable.add(version)
                result.versions[version] = dict(row)

    # --- what comes of it --------------------------------------------------------------

    def _settle_versions(self, newest: int) -> None:
        known, result = self._known, self._result
        for version in sorted(known.versions):
            row = known.versions[version]
            begins = version == 0 and not any(file["from_version"] <= 0 for file in result.files)
            if row["operation"] in _NO_FILES_CHANGED and (begins or version - 1 in self._readable):
                self._readable.add(version)
        gone = [row for row in result.files if row["to_version"] is not None and row["file_path"] not in self._there]
        least = max([known.min_readable, *(row["to_version"] for row in gone)])
        missing = {row["file_path"] for row in gone}
        result.files = [row for row in result.files if row["to_version"] is None or row["file_path"] not in missing]
        readable = sorted(version for version in self._readable if version >= least)
        result.min_readable = readable[0] if readable else newest
        for version in readable:
            result.versions.setdefault(version, dict(known.versions.get(version) or self._plain_version(version)))
        result.versions = {version: result.versions[version] for version in readable}
        if newest not in result.versions:
            result.versions[newest] = dict(known.versions.get(newest) or self._plain_version(newest))
        following = self._now + 1
        for version in sorted(result.versions, reverse=True):
            # Times never run backwards; of some it is only known until when.
            row = result.versions[version]
            row["committed_at"] = following = min(row["committed_at"], following - 1)
        expected = result.min_readable
        for version in sorted(result.versions):
            if version > expected:
                result.gaps.append((expected, version - 1))
            expected = version + 1
        if result.min_readable > known.min_readable:
            result.unknown.append(
                f"versions {known.min_readable} to {result.min_readable - 1} can be read no more: no snapshot has them"
            )
        result.unknown += [
            f"versions {first} to {last} lie between snapshots, and which files each had is not known"
            for first, last in result.gaps
        ]

    def _settle_files(self) -> None:
        result = self._result
        lost = [row for row in result.live if row["file_path"] not in self._there]
        if lost:
            result.unknown.append(
                f"{len(lost)} of its files are gone, {lost[0]['file_path']} for one, with"
                f" {sum(row['row_count'] for row in lost)} rows"
            )
        live = result.live
        data = [row for row in live if row["content"] == 0]
        totals = {
            "row_count": sum(row["row_count"] for row in data),
            "deleted_rows": sum(row["row_count"] for row in live if row["content"] != 0),
            "file_count": len(data),
            "total_size": sum(row["file_size"] for row in live),
        }
        result.table |= {
            **totals,
            "last_file_id": max([self._known.table["last_file_id"], *(row["id"] for row in result.files)]),
            "hold_until": 0,
        }


def _shown_by(row: Row) -> int | None:
    return decimal_in(str(row["summary"][SHOWN_BY]), MAX_BIGINT)


def _shape_ids(row: Row) -> tuple[int, int, int]:
    return (
        int(row["schema"].get("schema-id", 0)),
        int(row["partition_by"].get("spec-id", 0)),
        int(row["sort_by"].get("order-id", 0)),
    )


def known_tables(rows: Mapping[str, Iterable[Row]]) -> dict[int, Known]:
    """What the checkpoint says of each live table, by its id."""
    found = {row["id"]: Known(row) for row in rows["tables"] if row["deleted_at"] is None}
    for row in rows["table_metadata"]:
        if row["table_id"] in found:
            found[row["table_id"]].metadata.append(row)
    for row in rows["table_horizons"]:
        if row["table_id"] in found:
            found[row["table_id"]].min_readable = row["min_readable"]
    for row in rows["iceberg_tables"]:
        if row["table_id"] in found:
            found[row["table_id"]].pointer = row
    for row in rows["table_versions"]:
        if row["table_id"] in found:
            found[row["table_id"]].versions[row["version"]] = row
    for row in rows["table_snapshots"]:
        if row["table_id"] in found:
            said = (row["version"], row["pinned_version"], bool(row["is_ours"]))
            found[row["table_id"]].snapshots[row["snapshot_id"]] = said
    for row in rows["table_files"]:
        if row["table_id"] in found:
            found[row["table_id"]].files.append(row)
    for known in found.values():
        known.metadata.sort(key=lambda row: row["schema_version"])
    return found
