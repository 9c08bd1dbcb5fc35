"""A registry that is gone, rebuilt from the warehouse: from its newest checkpoint and from what files say themselves.

Nothing in the warehouse is changed. Where two files claim the same place and neither can be proven, none is taken;
what could not be known is reported.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lakebook import failpoints
from lakebook.clock import Clock, SystemClock, to_ms
from lakebook.config import MEMORY, Settings, load_settings, redact
from lakebook.errors import InvalidSetting, LakebookError
from lakebook.iceberg.numbering import KnownVersions, metadata_number
from lakebook.iceberg.publishing import default_location
from lakebook.iceberg.recovering import RecoveredTable, newest_metadata, recover_table
from lakebook.lake.attempts import DATA
from lakebook.lake.leasing import READS
from lakebook.metrics import Metrics
from lakebook.names import MAX_COUNTED, decimal_in, shown
from lakebook.pipelines.definitions import WAIT, definition_from
from lakebook.recovery.checkpoints import CHECKPOINTS, Checkpoint, is_checkpoint, newest_checkpoint
from lakebook.recovery.filling import TableFiller, fill_segments, segment_ids
from lakebook.recovery.report import Contested, Hole, Left, RebuildReport, RebuiltTable, RebuiltTopic
from lakebook.recovery.streams import FoundTopic, found_topics
from lakebook.recovery.tables import Known, Rebuilt, known_tables, made_known, rebuild_table
from lakebook.recovery.views import ViewMarks, kept_losses
from lakebook.registry import schema
from lakebook.registry.checkpoints import WHOLE
from lakebook.registry.databases import Database, SQLite, database_for
from lakebook.registry.pipelines import TABLE, TOPIC, table_pin, topic_pin
from lakebook.registry.rebuilding import Filling, check_empty, prepare
from lakebook.registry.registry import Registry
from lakebook.registry.stream_folders import TOPICS
from lakebook.registry.transactions import new_id
from lakebook.storage.access import access_of
from lakebook.storage.answers import NO_ANSWER, ObjectInfo
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

Row = dict[str, Any]
#: Hears how much is done, of how much if that is known, and of what.
Progress: TypeAlias = Callable[[int, int | None, str], None]

#: The namespace of tables whose names are not known.
RECOVERED = "recovered"
# Rows that are as new as this must have a commit row, or `verify` doubts them.
_DOUBTED_MS = 2 * 3600 * 1000
_OFFSETS, _VERSIONS = "offsets", "versions"
_TOLD_EVERY = 1000
# Of every object: its events begin anew.
_FIRST_SEQUENCE = 1


def rebuild_book(
    warehouse: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    clock: Clock | None = None,
    progress: Progress = lambda done, total, step: None,
    **settings: Any,
) -> RebuildReport:
    """Rebuild the registry of the book whose bytes are in `warehouse`, as a new one at `into`.

    The book begins a new epoch, and nothing is removed from it until somebody has looked at it. If it is stopped
    in the middle, there is no book at `into`, and another call begins anew. What the environment says about a
    registry and a warehouse does not count. A warehouse that has nothing of a book is refused (`InvalidSetting`).
    """
    resolved = load_settings(into, {**settings, "warehouse": os.fspath(warehouse)}, named=True)
    if resolved.registry == MEMORY:
        raise InvalidSetting("a book in memory would be gone at once", on=MEMORY, remedy="Name a folder or a URL")
    database = database_for(resolved)
    beside = database.path.parent if isinstance(database, SQLite) and database.path is not None else None
    place = Warehouse(resolved.warehouse, beside, access_of(resolved))
    if place.folder is not None and not place.folder.is_dir():
        raise InvalidSetting("there is no such folder", on=redact(place.root), remedy="Name the warehouse of a book")
    check_empty(database)
    # Before anything is made: at a place that is mistyped there would be a book with nothing in it.
    found = _list(ObjectStore(place), progress)
    found.refuse_nothing(redact(place.root))
    database.make_folder()
    with database.migration_lock():
        prepare(database)
        failpoints.reach("rebuild.begun")
        return _Rebuild(database, resolved, place, found, clock or SystemClock(), progress).run()


@dataclass
class _Found:
    """What the warehouse holds."""

    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    #: Metadata files by the location of their table.
    metadata: dict[str, list[str]] = field(default_factory=dict)

    #: The sizes of all objects.
    sizes: dict[str, int] = field(default_factory=dict)
    #: Objects by the folders of topics and tables, which have two parts.
    folders: dict[str, list[str]] = field(default_factory=dict)

    def seen(self, head: str) -> set[int]:
        """The ids by which folders of the warehouse are called."""
        parts = (folder.split("/") for folder in self.folders)
        numbers = (decimal_in(ident, MAX_COUNTED) for first, ident in parts if first == head)
        return {number for number in numbers if number is not None}

    def refuse_nothing(self, shown_root: str) -> None:
        """Refuse a place with nothing that a book could be made of."""
        if self.seen(TOPICS) or any(map(is_checkpoint, self.objects)) or any(map(_is_own_location, self.metadata)):
            return
        below = next(filter(None, map(_book_above, self.objects)), None)
        raise InvalidSetting(
            f"none of its {len(self.objects)} object(s) is a checkpoint, a segment or metadata of a table of its own",
            on=shown_root,
            remedy=f"Name the warehouse of a book: the place with `{CHECKPOINTS}`, `{DATA}` and `{TOPICS}` in it"
            + (f"; one seems to be in {shown(below)} below this one" if below is not None else ""),
        )


def _list(store: ObjectStore, progress: Progress) -> _Found:
    found = _Found()
    step = "listing the warehouse"
    progress(0, None, step)
    for item in store.list():
        found.objects[item.path] = item
        found.sizes[item.path] = item.size
        if item.path.count("/") > 1:
            found.folders.setdefault("/".join(item.path.split("/", 2)[:2]), []).append(item.path)
        head = item.path.partition("/")[0]
        if head not in (DATA, READS) and metadata_number(item.path) is not None:
            # <location>/metadata/<commit>/<name>
            location = item.path.rsplit("/", 3)
            if len(location) == 4 and location[1] == "metadata":
                found.metadata.setdefault(location[0], []).append(item.path)
        if len(found.objects) % _TOLD_EVERY == 0:
            progress(len(found.objects), None, step)
    progress(len(found.objects), None, step)
    return found


class _Rebuild:
    """One rebuild."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        warehouse: Warehouse,
        found: _Found,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self._registry = Registry(database, settings, clock, Metrics(clock))
        self._warehouse = warehouse
        self._store = ObjectStore(warehouse)
        self._clock = clock
        self._now = clock.now_ms()
        self._progress = progress
        self._fill = Filling(self._registry)
        self._most_partitions = settings.max_partitions
        self._report = RebuildReport(database.shown, redact(warehouse.root))
        self._commit_id = new_id()
        self._checkpoint: Checkpoint | None = None
        self._found = found
        self._report.objects = len(found.objects)
        self._why: dict[str, str] = {}
        self._used: set[str] = set()
        self._next_object = 1
        self._names: dict[int, str] = {}
        # Files of tables and segments that are filled in, and all of them.
        self._filled = self._files = 0
        # Tables that are made of others, and are made anew.
        self._forgotten: set[int] = set()

    def run(self) -> RebuildReport:
        try:
            return self._run()
        finally:
            self._registry.close()

    def _run(self) -> RebuildReport:
        report = self._report
        self._progress(0, None, "reading the checkpoint")
        self._checkpoint = newest_checkpoint(self._store, lambda path, why: report.torn_checkpoints.append((path, why)))
        known = self._checkpoint
        report.checkpoint = None if known is None else known.path
        report.checkpoint_at = None if known is None else known.moment
        if known is None:
            report.unknown.append(
                "there is no checkpoint that can be read: names, configuration, consumer groups, offsets, pipelines,"
                " views and what was not published"
            )
        rows = self._checkpoint_rows()
        self._next_object = 1 + max((row["object_id"] for table in _OBJECTS for row in rows[table]), default=0)
        tables = self._tables(rows)
        topics = self._topics(rows, tables)
        tables = self._without_derived(rows, tables, topics)
        self._fill_rows(rows, tables, topics)
        self._note_left()
        book_id = known.book_id if known is not None else new_id()
        created_at = known.created_at if known is not None else self._now
        report.book_id = book_id
        taken = known.at if known is not None else None
        report.epoch = self._fill.finish(
            book_id, self._warehouse.recorded, created_at, taken, self._least_ids(), self._store_times()
        )
        return report

    def _store_times(self) -> tuple[int | None, int]:
        """When the checkpoint was written, and up to when all is older than the book, by the clock of the store.

        The warehouse is not written to, not even to see its clock. Whatever was found is no newer than the newest of
        it; and what may have come since, not newer than now if the clocks agree.
        """
        found = self._found.objects
        known = found.get(self._checkpoint.path) if self._checkpoint is not None else None
        newest = max((to_ms(item.modified) for item in found.values()), default=0)
        return None if known is None else to_ms(known.modified), max(newest, self._clock.now_ms())

    # --- what there is ---------------------------------------------------------------

    def _checkpoint_rows(self) -> dict[str, list[Row]]:
        known = self._checkpoint
        rows = {str(table.name): list(known.of(str(table.name))) if known else [] for table in _TABLES}
        live = {row["id"] for row in rows["topics"] if row["deleted_at"] is None}
        for row in rows["topics"]:
            if row["deleted_at"] is not None:
                self._note_folder(f"{TOPICS}/{row['id']}", f"topic {row['name']} was deleted")
        rows["topics"] = [row for row in rows["topics"] if row["id"] in live]
        for name in ("partitions", "consumer_offsets", "producer_batches", "sink_batches", "mirror_positions"):
            rows[name] = [row for row in rows[name] if row["topic_id"] in live]
        return rows

    def _note_folder(self, folder: str, why: str) -> None:
        for path in self._found.folders.get(folder, ()):
            self._why[path] = why

    # --- tables ------------------------------------------------------------------------

    def _tables(self, rows: Mapping[str, Sequence[Row]]) -> dict[int, Rebuilt]:
        known = known_tables(rows)
        spaces = {row["id"]: row["name"] for row in rows["namespaces"]}
        for row in rows["tables"]:
            self._names[row["id"]] = f"{spaces.get(row['namespace_id'], '?')}.{row['name']}"
            if row["deleted_at"] is not None:
                self._drop(row)
        result: dict[int, Rebuilt] = {}
        for number, (ident, table) in enumerate(sorted(known.items())):
            self._progress(number, len(known), f"reading table {self._names[ident]}")
            pointer = table.pointer
            location = pointer["location"] if pointer is not None else default_location(table.table["table_uuid"])
            candidates = self._found.metadata.pop(location, [])
            recovered = self._recovered(
                self._names[ident], candidates, None if pointer is None else pointer["metadata_location"], table
            )
            if recovered is None and (pointer is not None):
                self._report.unknown.append(
                    f"table {self._names[ident]}: it was published, and no metadata file of it can be read"
                )
                continue
            result[ident] = self._rebuilt(table, recovered)
        taken = {row["id"] for row in rows["tables"]} | result.keys()
        for number, (location, candidates) in enumerate(sorted(self._found.metadata.items())):
            self._progress(number, len(self._found.metadata), f"reading the table at {location}")
            if _is_own_location(location):
                self._take_unknown(rows, location, candidates, result, taken)
            else:
                self._report.unknown.append(
                    f"the table with its metadata at {location}: the checkpoint does not name it, and no table of this"
                    " book lies there by itself; it is left alone, it may be another book's"
                )
        return result

    def _drop(self, row: Row) -> None:
        why = f"table {self._names[row['id']]} was dropped"
        location = default_location(row["table_uuid"])
        self._found.metadata.pop(location, None)
        self._note_folder(location, why)
        self._note_folder(f"{DATA}/{row['id']}", why)

    def _recovered(
        self, on: str, candidates: Sequence[str], pointer: str | None, known: Known | None
    ) -> RecoveredTable | None:
        newest = newest_metadata(self._store, candidates, pointer)
        for path, why in newest.unreadable:
            self._report.unknown.append(f"table {on}: its metadata file {path} cannot be read ({why})")
        if newest.contested:
            why = "each claims to be the table's next metadata, and nothing follows any of them"
            self._report.contested.append(Contested(f"table {on}", tuple(newest.contested), why))
            self._why |= dict.fromkeys(newest.contested, "it is contested")
        if newest.path is None or newest.metadata is None:
            return None
        try:
            recovered = recover_table(
                self._store,
                newest.chain,
                self._found.sizes,
                known.said(newest.chain[0][0]) if known is not None else KnownVersions(),
            )
        except NO_ANSWER:
            raise
        except LakebookError as error:
            self._report.unknown.append(f"table {on}: {error.what}")
            return None
        if newest.is_unproven:
            self._report.unproven.append(
                f"table {on}: its metadata file {newest.path} is newer than the checkpoint, and no other follows it"
            )
        return recovered

    def _rebuilt(self, known: Known, recovered: RecoveredTable | None) -> Rebuilt:
        return rebuild_table(known, recovered, self._found.objects, self._commit_id, self._now)

    def _take_unknown(
        self,
        rows: Mapping[str, Any],
        location: str,
        candidates: Sequence[str],
        result: dict[int, Rebuilt],
        taken: set[int],
    ) -> None:
        """A table that the checkpoint does not know: it is newer, or there is none."""
        recovered = self._recovered(f"at {location}", candidates, None, None)
        if recovered is None:
            return
        if self._is_of_topic(rows, recovered):
            why = "it shows the segments of a topic, and is made anew where that is to have a table (`iceberg=true`)"
            self._report.unknown.append(f"table at {location}: {why}")
            if not location.startswith(f"{TOPICS}/"):
                self._note_folder(location, why)
            return
        said = {
            number
            for file in recovered.files
            if (parts := file.path.split("/"))[0] == DATA
            and len(parts) > 3
            and (number := decimal_in(parts[1], MAX_COUNTED)) is not None
        }
        ident = said.pop() if len(said) == 1 else 0
        if not ident or ident in taken:
            taken |= self._found.seen(DATA)
            ident = max(taken, default=0) + 1
        taken.add(ident)
        namespace_id = self._recovered_namespace(rows)
        name = f"recovered_{ident}"
        self._names[ident] = f"{RECOVERED}.{name}"
        made = made_known(recovered, ident, namespace_id, name, self._object(), self._now)
        result[ident] = self._rebuilt(made, recovered)
        self._report.unknown.append(f"table {self._names[ident]}: its name; its metadata lies at {location}")

    def _is_of_topic(self, rows: Mapping[str, Any], recovered: RecoveredTable) -> bool:
        """Whether all files of a table are segments: as an ordinary one it would have a say in what becomes of them."""
        listed = {row["s3_key"] for row in rows["segments"]}
        return bool(recovered.files) and all(
            file.path.startswith(f"{TOPICS}/") or file.path in listed for file in recovered.files
        )

    def _recovered_namespace(self, rows: Mapping[str, Any]) -> int:
        for row in rows["namespaces"]:
            if row["name"] == RECOVERED:
                return int(row["id"])
        ident = max((row["id"] for row in rows["namespaces"]), default=0) + 1
        rows["namespaces"].append({"id": ident, "name": RECOVERED, "properties": {}, "created_at": self._now})
        return ident

    def _object(self) -> int:
        ident, self._next_object = self._next_object, self._next_object + 1
        return ident

    # --- topics ------------------------------------------------------------------------

    def _topics(self, rows: dict[str, list[Row]], tables: Mapping[int, Rebuilt]) -> list[FoundTopic]:
        listed = {row["s3_key"] for row in rows["segments"]}
        objects = [
            item
            for path, item in self._found.objects.items()
            if (path.startswith(f"{TOPICS}/") or path in listed) and path not in self._why
        ]
        mirrored = {
            row["file_path"] for table in tables.values() if table.table["topic_id"] is not None for row in table.live
        }

        def unreadable(item: ObjectInfo, why: str) -> None:
            self._why[item.path] = f"no segment that can be read ({why})"
            self._report.unknown.append(f"{item.path}: whether it is a segment, and which records it has ({why})")

        waiting: dict[tuple[int, int], int] = {}
        for row in _waiting_offsets(rows):
            place = (row["source_id"], row["partition_id"])
            waiting[place] = min(row["next_offset"], waiting.get(place, row["next_offset"]))

        def read(count: int) -> None:
            self._progress(count, len(objects), "reading segments")

        read(0)
        found = found_topics(self._store, rows, objects, mirrored, waiting, unreadable, self._most_partitions, read)
        sinks: dict[int, dict[str, Row]] = {}
        for row in rows["sink_batches"]:
            sinks.setdefault(row["topic_id"], {})[row["sink_id"]] = row
        for topic in found:
            if topic.row is None:
                topic.row = self._unknown_topic(topic)
                rows["topics"].append(topic.row)
                self._report.unknown.append(
                    f"topic {topic.name}: its name and its configuration, and the offsets of its groups"
                )
            self._take_sinks(sinks.setdefault(topic.id, {}), topic)
            self._tell_of(topic)
        rows["sink_batches"] = [row for known in sinks.values() for row in known.values()]
        return found

    def _unknown_topic(self, topic: FoundTopic) -> Row:
        return {
            "id": topic.id,
            "object_id": self._object(),
            "name": f"recovered_{topic.id}",
            "partition_count": len(topic.partitions),
            "retention_ms": None,
            "config": {},
            "created_at": self._now,
            "updated_at": self._now,
            "deleted_at": None,
        }

    def _take_sinks(self, known: dict[str, Row], topic: FoundTopic) -> None:
        """How far the sinks of a topic have come, by the checkpoint (`known`) and by its segments."""
        for sink, last in topic.sinks.items():
            if sink not in known or known[sink]["batch_id"] < last.number:
                known[sink] = {
                    "topic_id": topic.id,
                    "sink_id": sink,
                    "batch_id": last.number,
                    "commit_id": last.commit_id,
                    "updated_at": self._now,
                }
        if any(claim.says_no_batch for part in topic.partitions.values() for claim in part.unproven):
            self._report.unknown.append(
                f"topic {topic.name}: which batches of its sinks have landed after the checkpoint: some of its segments"
                " were written by a version of Lakebook that did not say so; look for the last batch of each query"
                " before it is started again"
            )

    def _tell_of(self, topic: FoundTopic) -> None:
        report = self._report
        self._why |= {
            claim.path: "of a batch that was not stored as a whole: it never counted" for claim in topic.unfinished
        }
        segments = records = 0
        for partition in topic.partitions.values():
            on = f"{topic.name}/{partition.number}"
            settled = partition.settled
            for why, claims in (
                ("its records are in other segments too", settled.superseded),
                ("other segments are proven to have its offsets", settled.disproved),
                ("it lies below the log start", settled.below),
                ("it is contested", settled.contested),
            ):
                self._why |= {claim.path: why for claim in claims}
            for some in partition.contested:
                paths = tuple(claim.path for claim in some)
                first, last = min(claim.base for claim in some), max(claim.end for claim in some) - 1
                why = "they claim the same offsets and have other records"
                if len(some) == 1 and some[0].attempt is not None:
                    why = "it is a part of a batch, and another part of it is contested"
                report.contested.append(Contested(on, paths, why, first, last))
            for first, last, why in partition.holes:
                report.holes.append(Hole(topic.name, partition.number, first, last, why))
            if partition.unproven:
                report.unproven.append(
                    f"{on}: {len(partition.unproven)} segments from offset {partition.unproven[0].base} on are newer"
                    " than the checkpoint"
                )
            segments += len(settled.chosen)
            records += sum(claim.count for claim in settled.chosen)
        report.topics.append(RebuiltTopic(topic.name, len(topic.partitions), segments, records))

    # --- what is made of others --------------------------------------------------------

    def _without_derived(
        self, rows: dict[str, list[Row]], tables: Mapping[int, Rebuilt], topics: Sequence[FoundTopic]
    ) -> dict[int, Rebuilt]:
        """Leave out tables of topics and views that do not agree with what they are made of: they are made anew."""
        kept = dict(tables)
        by_topic = {topic.id: topic for topic in topics}
        shown: dict[int, list[Row]] = {}
        for row in rows["mirror_positions"]:
            shown.setdefault(row["topic_id"], []).append(row)
        for ident, table in tables.items():
            topic_id, view_id = table.table["topic_id"], table.table["view_id"]
            paths = {row["file_path"] for row in table.live}
            if topic_id is not None:
                positions = by_topic[topic_id].mirrored(paths) if topic_id in by_topic else None
                shown[topic_id] = positions or []
                if positions is None:
                    del kept[ident]
                    self._forget(table, "its topic has other segments, and it is made anew from them")
            elif view_id is not None and not self._agrees(rows, ident, paths):
                del kept[ident]
                instances = [row for row in rows["view_instances"] if row["table_id"] == ident]
                rows["view_instances"] = [row for row in rows["view_instances"] if row["table_id"] != ident]
                self._forget(table, "ranges were built after the checkpoint; build the view again")
                gone = {(self._view_name(rows, row["view_id"]), row["instance"]) for row in instances}
                rows["lakehouse_partitions"] = [
                    row
                    for row in rows["lakehouse_partitions"]
                    if (row["view_set_name"], row["view_instance_id"]) not in gone
                ]
        rows["mirror_positions"] = [row for some in shown.values() for row in some]
        return kept

    def _view_name(self, rows: Mapping[str, Sequence[Row]], view_id: int) -> str:
        return next((str(row["name"]) for row in rows["views"] if row["id"] == view_id), "")

    def _agrees(self, rows: Mapping[str, Sequence[Row]], table_id: int, paths: set[str]) -> bool:
        """Whether a view's table has exactly the files of its ranges."""
        views = {row["id"]: row["name"] for row in rows["views"]}
        instances = {
            (views.get(row["view_id"]), row["instance"])
            for row in rows["view_instances"]
            if row["table_id"] == table_id
        }
        ranges = {
            row["file_path"]
            for row in rows["lakehouse_partitions"]
            if (row["view_set_name"], row["view_instance_id"]) in instances and row["file_path"] is not None
        }
        return bool(instances) and ranges == paths

    def _forget(self, table: Rebuilt, why: str) -> None:
        self._forgotten.add(table.table["id"])
        self._report.unknown.append(f"table {self._names[table.table['id']]}: {why}")

    # --- filling -----------------------------------------------------------------------

    def _fill_rows(
        self, rows: dict[str, list[Row]], tables: Mapping[int, Rebuilt], topics: Sequence[FoundTopic]
    ) -> None:
        fill, report = self._fill, self._report
        partitions = self._partition_rows(topics)
        self._number_states(rows, tables)
        objects = [
            *(("topic", row) for row in rows["topics"]),
            *(("partition", row) for row in partitions),
            *(("group", row) for row in rows["consumer_groups"]),
            *(("table", table.table) for table in tables.values()),
        ]
        fill.insert(
            schema.lake_objects,
            (
                {
                    "id": row["object_id"],
                    "kind": kind,
                    "last_sequence": _FIRST_SEQUENCE,
                    "last_commit_at": self._now,
                }
                for kind, row in sorted(objects, key=lambda item: item[1]["object_id"])
            ),
        )
        for table in (schema.namespaces, schema.topics):
            fill.insert(table, rows[str(table.name)])
        fill.insert(schema.partitions, partitions)
        live = {(row["topic_id"], row["partition_id"]) for row in partitions}
        for table in (schema.consumer_groups, schema.offset_resets, schema.sink_batches, schema.mirror_positions):
            fill.insert(table, rows[str(table.name)])
        fill.insert(
            schema.consumer_offsets,
            [row for row in rows["consumer_offsets"] if (row["topic_id"], row["partition_id"]) in live],
        )
        fill.insert(schema.producers, _producers(rows["producers"], topics, self._now))
        ids = segment_ids(topics)
        fill.insert(schema.producer_batches, _producer_batches(rows["producer_batches"], topics, ids))
        fill.insert(schema.append_turns, self._turns(topics))
        # Nearly all the time goes into the files: each is read as a whole.
        self._files = sum(len(table.files) for table in tables.values()) + sum(len(topic.chosen) for topic in topics)
        self._fill_tables(tables)
        written = set(self._used)
        bucket = self._warehouse.recorded
        fill_segments(fill, self._registry, self._store, topics, bucket, self._commit_id, ids, written, self._advance)
        self._used |= {claim.path for topic in topics for claim in topic.chosen}
        fill.insert(schema.known_gaps, self._gaps(tables, topics))
        fill.insert(schema.commits, self._commits(tables))
        for table in (schema.views, schema.view_instances, schema.view_sources, schema.lakehouse_partitions):
            fill.insert(table, rows[str(table.name)])
        self._fill_losses(rows, tables, topics)
        fill.insert(schema.pipelines, [self._pipeline(row, tables) for row in rows["pipelines"]])
        fill.insert(schema.pipeline_offsets, rows["pipeline_offsets"])
        fill.insert(schema.topic_leases, self._topic_pins(rows, topics))
        fill.insert(schema.leases, self._table_pins(rows, tables))
        fill.insert(schema.pauses, rows["pauses"])
        report.groups, report.views = len(rows["consumer_groups"]), len(rows["views"])
        report.pipelines = len(rows["pipelines"])

    def _advance(self, files: int, step: str) -> None:
        self._filled += files
        self._progress(self._filled, self._files, step)

    def _fill_losses(
        self, rows: Mapping[str, Sequence[Row]], tables: Mapping[int, Rebuilt], topics: Sequence[FoundTopic]
    ) -> None:
        """What sources of views had lost, what they have lost or got now, and which ranges that concerns."""
        known = self._checkpoint
        # Older versions of Lakebook have not put it into their checkpoints.
        at = known.at if known is not None and str(schema.source_losses.name) not in known.columns else None
        self._fill.insert(schema.source_losses, kept_losses(rows["source_losses"], tables, topics, at))
        marks = ViewMarks(rows, tables, self._forgotten, topics, self._names)
        self._report.marked_views = self._registry.write(marks.apply)

    def _number_states(self, rows: Mapping[str, Sequence[Row]], tables: Mapping[int, Rebuilt]) -> None:
        """Give states of tables that are new here ids above those of the checkpoint."""
        ident = max((row["id"] for row in rows["table_metadata"]), default=0)
        for _, table in sorted(tables.items()):
            for row in table.metadata:
                if row["id"] is None:
                    ident += 1
                    row["id"] = ident

    def _partition_rows(self, topics: Sequence[FoundTopic]) -> list[Row]:
        found = []
        for topic in topics:
            for number, partition in sorted(topic.partitions.items()):
                former = partition.row
                found.append(
                    {
                        "topic_id": topic.id,
                        "partition_id": number,
                        "object_id": self._object() if former is None else former["object_id"],
                        "log_start": partition.log_start,
                        "high_watermark": partition.watermark,
                        "created_at": self._now if former is None else former["created_at"],
                        "updated_at": self._now,
                    }
                )
        return found

    def _turns(self, topics: Sequence[FoundTopic]) -> Iterator[Row]:
        """Tokens go on above those of every folder: nobody sweeps a folder that was there."""
        used: dict[tuple[str, str], int] = {}
        for path in self._found.objects:
            # topics/<topic>/<partition>/t<token>/<name>
            parts = path.split("/")
            if len(parts) > 4 and parts[0] == TOPICS and parts[3][:1] == "t":
                place = (parts[1], parts[2])
                used[place] = max(used.get(place, 0), decimal_in(parts[3][1:], MAX_COUNTED) or 0)
        for topic in topics:
            for number in topic.partitions:
                token = used.get((str(topic.id), str(number)))
                if token:
                    yield {
                        "topic_id": topic.id,
                        "partition_id": number,
                        "token": token,
                        "holder": None,
                        "commit_id": None,
                        "expires_at": 0,
                    }

    def _fill_tables(self, tables: Mapping[int, Rebuilt]) -> None:
        for ident, table in sorted(tables.items()):
            step = f"filling table {self._names[ident]}"
            self._advance(0, step)
            filler = TableFiller(self._fill, self._registry, self._store, self._found.objects, self._used, self._now)
            filler.fill(table, lambda files: self._advance(files, step))  # noqa: B023 - called at once
            for text in (*table.unknown, *filler.unknown):
                self._report.unknown.append(f"table {self._names[ident]}: {text}")
            self._report.tables.append(
                RebuiltTable(
                    self._names[ident],
                    table.table["version"],
                    table.table["row_count"],
                    table.table["file_count"],
                    table.min_readable,
                    len(table.recovered.snapshots) if table.recovered is not None else 0,
                    tuple(table.gaps),
                )
            )

    def _gaps(self, tables: Mapping[int, Rebuilt], topics: Sequence[FoundTopic]) -> Iterator[Row]:
        def gap(kind: str, owner: int, number: int, first: int, last: int, why: str) -> Row:
            return {
                "kind": kind,
                "owner_id": owner,
                "partition_id": number,
                "first_number": first,
                "last_number": last,
                "reason": why,
                "noted_at": self._now,
            }

        for ident, table in tables.items():
            for first, last in table.gaps:
                yield gap(_VERSIONS, ident, 0, first, last, "no snapshot has them")
        for topic in topics:
            for number, partition in topic.partitions.items():
                for first, last, why in partition.holes:
                    yield gap(_OFFSETS, topic.id, number, first, last, why)

    def _commits(self, tables: Mapping[int, Rebuilt]) -> Iterator[Row]:
        """Commit rows of what is so new that it is expected to have one."""
        since = self._now - _DOUBTED_MS
        ids = {row["commit_id"] for table in tables.values() for row in table.files if row["created_at"] >= since}
        for commit_id in sorted({self._commit_id, *ids}):
            yield {
                "id": commit_id,
                "kind": "insert",
                "state": "committed",
                "epoch": "",
                "owner": "rebuild",
                "opened_at": self._now,
                "finished_at": self._now,
            }

    def _pipeline(self, row: Row, tables: Mapping[int, Rebuilt]) -> Row:
        """A pipeline whose targets are newer than the checkpoint may have landed more than its offsets say."""
        targets = [ident for ident in (row["target_id"], row["dead_letters_id"]) if ident is not None]
        wrong = [ident for ident in targets if ident not in tables or tables[ident].is_newer]
        kept = {**row, "holder": None, "held_until": None}
        if not wrong:
            return kept
        why = (
            "the registry was rebuilt, and its target is newer than the checkpoint: which records of its sources have"
            " landed is not known"
        )
        self._report.unknown.append(f"pipeline {row['name']}: {why}; it is stopped")
        return {**kept, "state": "stopped", "last_error": why, "failed_at": self._now}

    def _topic_pins(self, rows: Mapping[str, Sequence[Row]], topics: Sequence[FoundTopic]) -> Iterator[Row]:
        """What pipelines have still to read of topics: leases are in no checkpoint."""
        places = {(topic.id, number): found for topic in topics for number, found in topic.partitions.items()}
        for row in _waiting_offsets(rows):
            found = places.get((row["source_id"], row["partition_id"]))
            if found is None:
                continue
            offset = min(max(row["next_offset"], found.first_kept), found.watermark)
            yield topic_pin(
                row["pipeline_id"], row["source_id"], row["partition_id"], offset, _FIRST_SEQUENCE, self._now
            )

    def _table_pins(self, rows: Mapping[str, Sequence[Row]], tables: Mapping[int, Rebuilt]) -> Iterator[Row]:
        """What pipelines have still to read of tables."""
        for row in rows["pipeline_offsets"]:
            table = tables.get(row["source_id"]) if row["kind"] == TABLE else None
            if table is not None:
                version = min(max(row["next_offset"] - 1, table.min_readable), table.table["version"])
                yield table_pin(row["pipeline_id"], row["source_id"], version, self._now)

    # --- the end -----------------------------------------------------------------------

    def _note_left(self) -> None:
        names = self._names
        for path, item in sorted(self._found.objects.items()):
            head, _, rest = path.partition("/")
            if path in self._used or head == CHECKPOINTS:
                continue
            why = self._why.get(path)
            if why is None and head == DATA:
                name = names.get(decimal_in(rest.partition("/")[0]) or 0)
                why = "no version that is known has it: it is newer, was retired, or was never committed"
                why = f"of table {name}: {why}" if name is not None else f"of a table that is not known: {why}"
            elif why is None:
                why = {READS: "a table that was staged for a reader", TOPICS: "no segment that is known"}.get(
                    head, "nothing refers to it"
                )
            self._report.left.append(Left(path, item.size, why))

    def _least_ids(self) -> dict[str, int]:
        return {"topics": max(self._found.seen(TOPICS), default=0), "tables": max(self._found.seen(DATA), default=0)}


_OBJECTS = ("topics", "partitions", "consumer_groups", "tables")
_TABLES = (
    *WHOLE,
    schema.table_versions,
    schema.table_snapshots,
    schema.segments,
    schema.source_losses,
    schema.table_files,
)


def _waiting_offsets(rows: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    """Where pipelines stand in topics that keep for them what they have still to read."""
    waited = {row["id"] for row in rows["pipelines"] if definition_from(row["definition"]).retention == WAIT}
    for row in rows["pipeline_offsets"]:
        if row["kind"] == TOPIC and row["pipeline_id"] in waited:
            yield row


def _producers(known: Sequence[Row], topics: Sequence[FoundTopic], now: int) -> list[Row]:
    """The newest epoch of each producer, by the checkpoint and by its segments."""
    found = {row["producer_id"]: dict(row) for row in known}
    for topic in topics:
        for claim in topic.claimed:
            if claim.producer_id is None or claim.producer_epoch is None:
                continue
            row = found.setdefault(claim.producer_id, {"producer_id": claim.producer_id, "epoch": 0, "updated_at": now})
            row["epoch"] = max(row["epoch"], claim.producer_epoch)
    return list(found.values())


def _producer_batches(known: Sequence[Row], topics: Sequence[FoundTopic], ids: Mapping[str, str]) -> list[Row]:
    """The last append of each producer in a partition, by the checkpoint and by its segments, which have `ids`."""
    found = {(row["topic_id"], row["partition_id"], row["producer_id"]): dict(row) for row in known}
    for topic in topics:
        for claim in topic.chosen:
            if claim.batch is None or claim.last_sequence is None:
                continue
            key = (claim.topic_id, claim.partition, claim.producer_id)
            if key in found and found[key]["base_offset"] >= claim.base:
                continue
            found[key] = {
                "topic_id": claim.topic_id,
                "partition_id": claim.partition,
                "producer_id": claim.producer_id,
                "producer_epoch": claim.producer_epoch,
                "first_sequence": claim.first_sequence,
                "last_sequence": claim.last_sequence,
                "base_offset": claim.base,
                "end_offset": claim.end - 1,
                "segment_id": ids[claim.path],
            }
    return list(found.values())


def _book_above(path: str) -> str | None:
    """The folder in which there may be a book, if this is a checkpoint of one."""
    above, found, name = path.rpartition(f"/{CHECKPOINTS}/")
    return above if found and is_checkpoint(f"{CHECKPOINTS}/{name}") else None


def _is_own_location(location: str) -> bool:
    """Whether a table of this book lies there by itself; below another root is another book, alive perhaps."""
    try:
        return location == default_location(str(uuid.UUID(location.rpartition("/")[2])))
    except ValueError:
        return False
