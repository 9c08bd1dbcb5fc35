"""The Iceberg updater keeps what other engines read current: it publishes tables that have changed.

It knows nothing of its own. Which versions are not published, the registry says; that two publish at once
does no harm, because the pointer moves by compare-and-swap.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from lakebook.cdc.subscribers import Event, Refresh, Subscriber
from lakebook.components.component import Component, Entry
from lakebook.errors import LakebookError, NotPublishable, TableNotFound
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import PARQUET
from lakebook.registry.owed import begin_updates, fail_updates, owe_unpublished, owed_upto, resume_updates
from lakebook.registry.publishing import Pointer, Standing, pointer_of, standing_of
from lakebook.registry.schedulers import UPDATER
from lakebook.registry.tables import TableRecord
from lakebook.registry.transactions import Reader, Transaction

LOG = logging.getLogger("lakebook.components")

# Versions whose state one attempt writes down at most: as many as one step publishes.
_MOST_VERSIONS = 5000
# Asked for in a health check; it need not be there.
_ANY_OBJECT = "iceberg/health"


class IcebergUpdater(Component, Subscriber):
    """Publishes tables whose files or metadata have changed."""

    name = UPDATER
    #: A first publication of a million files takes minutes.
    timeout = 900.0

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake)
        # So that a burst of changes becomes one snapshot.
        self.linger = lake.settings.publish_lag
        self._lock = threading.Lock()
        self._at_work: dict[int, str] = {}
        self._counts = {"published": 0, "failed": 0}

    def on_event(self, event: Event[Any]) -> None:
        """Publish the table that has changed."""
        self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        """Publish the table that has changed, once, however much of it has."""
        if events:
            self._publish(events[-1].data.table_id, "the table has changed")

    def on_refresh(self, refresh: Refresh) -> None:
        """Publish what is not published of a table, and look whether what is lies where it should."""
        if refresh.table is not None:
            self._publish(refresh.table.id, refresh.reason, anew=True)

    def on_health(self) -> None:
        """Raise if the registry or the warehouse does not answer."""
        self.paused()
        self.lake.store.size(_ANY_OBJECT)

    def status(self) -> Mapping[str, Any]:
        """What it publishes now, and what it has done since it was started."""
        with self._lock:
            return {"at_work": sorted(self._at_work.values()), **self._counts}

    # --- publishing ------------------------------------------------------------------

    def _publish(self, table_id: int, reason: str, *, anew: bool = False) -> None:
        standing, before = self.lake.registry.read_with(lambda reader: _found(reader, table_id))
        if standing is None or not (standing.is_pending or anew):
            return
        table = self.table(table_id)
        # What comes while it rests is not lost: whoever lets it go on has it refreshed.
        if table is None or table.format != PARQUET or self.paused(table_id) is not None:
            return
        if standing.is_pending:
            self._begin(table, anew=anew)
        # What cannot be published is no fault of whoever publishes, and trying again does not help before the
        # table changes: it is written down, and no attempt is used up.
        with (
            suppress(NotPublishable),
            self._working(table),
            self.journal.work("publish", reason, table_id) as entry,
        ):
            entry.worth_noting = False
            self._try(table, before, entry)

    def _try(self, table: TableRecord, before: Pointer | None, entry: Entry) -> None:
        begun = self.lake.clock.monotonic()
        try:
            pointer = self.lake.publish(table)
        except TableNotFound:
            return  # It was dropped meanwhile.
        except NotPublishable as error:
            LOG.warning("%s", error)
            self._fail(table, error)
            raise
        except Exception as error:
            # The error itself is the one to report; what it left as begun, the next attempt goes on from.
            with suppress(LakebookError):
                self._fail(table, error)
            raise
        if pointer is not None and pointer != before:
            self._count("published")
            entry.worth_noting = True
            entry.detail |= _difference(before, pointer)
            entry.detail["seconds"] = round(self.lake.clock.monotonic() - begun, 3)

    def _begin(self, table: TableRecord, *, anew: bool) -> None:
        upto = self.lake.registry.read_with(lambda reader: owed_upto(reader, table.id, _MOST_VERSIONS))
        if upto is None:
            return  # Nothing is written where nothing was written down.

        def work(transaction: Transaction) -> None:
            if anew:
                resume_updates(transaction, table.id)
            begin_updates(transaction, table.id, min(upto, table.version))

        self.lake.registry.write(work)

    def _fail(self, table: TableRecord, error: Exception) -> None:
        self._count("failed")

        def work(transaction: Transaction) -> None:
            # Why it failed must be seen, also where nobody has written down yet that it is owed.
            owe_unpublished(transaction, table.id, -1, _MOST_VERSIONS)
            upto = min(owed_upto(transaction, table.id, _MOST_VERSIONS) or 0, table.version)
            begin_updates(transaction, table.id, upto)
            fail_updates(transaction, table.id, upto, f"{type(error).__name__}: {error}")

        self.lake.registry.write(work)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    @contextmanager
    def _working(self, table: TableRecord) -> Iterator[None]:
        with self._lock:
            self._at_work[table.id] = f"{table.namespace}.{table.name}"
        try:
            yield
        finally:
            with self._lock:
                self._at_work.pop(table.id, None)


def _found(reader: Reader, table_id: int) -> tuple[Standing | None, Pointer | None]:
    return standing_of(reader, table_id), pointer_of(reader, table_id)


def _difference(before: Pointer | None, after: Pointer) -> dict[str, Any]:
    """What was published; of properties alone, the version they are of."""
    first = 0 if before is None else before.version + 1
    return {
        "from_version": min(first, after.version),
        "to_version": after.version,
        # Sequence numbers rise by one per snapshot.
        "snapshots": after.last_sequence - (0 if before is None else before.last_sequence),
    }
