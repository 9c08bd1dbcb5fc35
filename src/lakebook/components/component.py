"""What every component has: a life, a journal, pauses, and something to say about itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lakebook.errors import CompactionClaimed, LakebookError, PipelineBusy
from lakebook.lake.compaction import GAVE_WAY
from lakebook.lake.lake import Lake
from lakebook.registry.maintenance import DONE, FAILED, YIELDED, Pause, note_work, pause_of
from lakebook.registry.tables import GET_TABLE_BY_ID, TableRecord, table_from

LOG = logging.getLogger("lakebook.components")

# Another worker does it: nothing was begun, and there is nothing to write down.
_CLAIMED = (CompactionClaimed, PipelineBusy)


@dataclass
class Entry:
    """A piece of work while it is done."""

    detail: dict[str, Any] = field(default_factory=dict)
    #: Whether there was something to do; else nothing is written down.
    worth_noting: bool = True


class Journal:
    """Writes down what a component does to which table, when and why."""

    def __init__(self, lake: Lake, component: str) -> None:
        self._lake = lake
        self._component = component

    @contextmanager
    def work(self, action: str, reason: str, table_id: int | None = None) -> Iterator[Entry]:
        """Write down what the block does, and how it ends."""
        entry = Entry()
        started = self._lake.clock.now_ms()
        try:
            yield entry
        except _CLAIMED:
            raise
        except BaseException as error:
            outcome = YIELDED if isinstance(error, GAVE_WAY) else FAILED
            detail = {**entry.detail, "error": f"{type(error).__name__}: {error}"}
            self._note(table_id, action, reason, outcome, detail, started)
            raise
        if entry.worth_noting:
            self._note(table_id, action, reason, DONE, entry.detail, started)

    def _note(
        self, table_id: int | None, action: str, reason: str, outcome: str, detail: Mapping[str, Any], started: int
    ) -> None:
        try:
            self._lake.registry.write(
                lambda transaction: note_work(
                    transaction, self._component, table_id, action, reason, outcome, detail, started
                )
            )
        except LakebookError as error:
            # The work itself is done, or has failed with an error of its own.
            LOG.warning("%s could not write down what it did (%s)", self._component, error)


class Component:
    """Something that looks after tables. It lives while this process has the scheduler's turn.

    A worker, which claims whatever it works on, may live longer: while the process waits for the turn, too.
    """

    name: ClassVar[str]
    #: Whether this process has the turn, and a subscriber is told of events. A worker looks by itself while it is not.
    told: bool = True

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.journal = Journal(lake, self.name)
        self._looked_at = float("-inf")

    def may_look(self) -> bool:
        """Whether to look now for what is due: less often where another process looks at the same all the time."""
        now = self.lake.clock.monotonic()
        if not self.told and now - self._looked_at < self.lake.settings.worker_interval:
            return False
        self._looked_at = now
        return True

    def start(self) -> None:
        """Begin to work by the clock, where it does; once is enough."""

    def stop(self) -> None:
        """End that; what is at work is waited for."""

    def status(self) -> Mapping[str, Any]:
        """What it does now and what is next, for `lakebook maintenance status`. Plain values only."""
        return {}

    def paused(self, table_id: int | None = None) -> Pause | None:
        """Why it rests now, altogether or on a table; none if it does not."""
        return self.lake.registry.read_with(lambda reader: pause_of(reader, self.name, table_id))

    def table(self, table_id: int) -> TableRecord | None:
        """A table as it is now; none if it is gone."""
        row = self.lake.registry.one(GET_TABLE_BY_ID, table_id)
        return None if row is None else table_from(row)
