"""The topic publisher keeps the tables of topics current: it puts new segments of topics with `iceberg=true` into them.

A partition's row changes with whatever is appended to it, merged or removed, and so tells of all that there is to do.
It knows nothing of its own. How far a topic is in its table, the registry says; that two mirror at once does no
harm, because the positions move under the table's lock. Publishing the table is the Iceberg updater's work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from lakebook.cdc.subscribers import Event, Refresh, Subscriber
from lakebook.components.component import Component
from lakebook.errors import BookClosed, EpochChanged, LakebookError, SubscriberFailed, TableAlreadyExists, TopicNotFound
from lakebook.lake.lake import Lake
from lakebook.pages import PAGE_SIZE
from lakebook.registry.mirrors import MirroredTopic, mirrored_topic, topic_of_object
from lakebook.registry.topics import list_topics
from lakebook.streams.mirroring import MirrorReport, mirror_topic

LOG = logging.getLogger("lakebook.components")

#: Topics whose state is shown.
TOPICS_SHOWN = 100


class TopicPublisher(Component, Subscriber):
    """Mirrors topics that have changed, and drops the tables of topics that are not to have one any more."""

    name = "topic_publisher"
    #: A first mirroring of many segments takes minutes.
    timeout = 900.0

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake)
        # So that a burst of segments becomes one version.
        self.linger = lake.settings.publish_lag
        self._lock = threading.Lock()
        # Topics that are being mirrored, and those that could not be, with the reason. By their ids.
        self._at_work: dict[int, str] = {}
        self._waiting: dict[int, tuple[str, str]] = {}
        self._counts = {"versions": 0, "files": 0, "dropped": 0}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # --- what it is told -------------------------------------------------------------

    def on_event(self, event: Event[Any]) -> None:
        """Mirror the topic that has changed."""
        self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        """Mirror the topic that has changed, once, however much of it has."""
        if events:
            row = events[-1].data
            self._look(row.id if events[-1].table == "topics" else row.topic_id, "the topic has changed")

    def on_refresh(self, refresh: Refresh) -> None:
        """Mirror what is not in the table of a topic yet."""
        if refresh.table is not None:
            topic_id = refresh.table.topic_id
        else:
            topic_id = self.lake.registry.read_with(lambda reader: topic_of_object(reader, refresh.object_id))
        if topic_id is not None:
            self._look(topic_id, refresh.reason)

    def on_health(self) -> None:
        """Raise if its thread has ended by itself, or the registry does not answer."""
        thread = self._thread
        if thread is not None and not thread.is_alive() and not self._ending.is_set():
            raise SubscriberFailed("its thread has ended", on=self.name, remedy="Restart the process")
        self.paused()

    def status(self) -> Mapping[str, Any]:
        """What it mirrors now, what it has done since it was started, and what it could not do."""
        with self._lock:
            waiting = list(self._waiting.values())[:TOPICS_SHOWN]
            return {
                "at_work": sorted(self._at_work.values()),
                **self._counts,
                "waiting": [{"topic": topic, "why": why} for topic, why in waiting],
            }

    # --- its life --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look again, now and then, at topics that could not be mirrored."""
        if self._thread is None or not self._thread.is_alive():
            self._ending.clear()
            self._thread = threading.Thread(target=self._run, name="lakebook-topic-publisher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End that; what is at work is waited for."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            thread.join()

    def _run(self) -> None:
        # Not by events: what is in the way is a table of somebody's own, or readers of a former one.
        while not self._ending.wait(self.lake.settings.maintenance_interval):
            try:
                self.look_again()
            except (BookClosed, EpochChanged) as error:
                LOG.warning("%s ends: nothing can be done through this book any more (%s)", self.name, error)
                self._ending.set()

    def look_again(self) -> int:
        """Try again what could not be done; how many topics are left that could not be mirrored."""
        with self._lock:
            waiting = list(self._waiting)
        for topic_id in waiting:
            try:
                self._look(topic_id, "it is tried again")
            except (BookClosed, EpochChanged):
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the other topics go on
                LOG.warning("topic %d could not be mirrored (%s: %s)", topic_id, type(error).__name__, error)
        with self._lock:
            return len(self._waiting)

    # --- the work --------------------------------------------------------------------

    def _look(self, topic_id: int, reason: str) -> None:
        topic = self.lake.registry.read_with(lambda reader: mirrored_topic(reader, topic_id))
        # What comes while it rests is not lost: whoever lets it go on has it refreshed.
        if topic is None or self.paused(topic.table_id) is not None:
            self._note_waiting(topic_id, None)
            return
        try:
            self._mirror(topic, reason)
        except TopicNotFound:
            self._note_waiting(topic_id, None)  # It was deleted meanwhile.

    def _mirror(self, topic: MirroredTopic, reason: str) -> MirrorReport:
        with self._working(topic), self.journal.work("mirror", reason, topic.table_id) as entry:
            entry.worth_noting = False
            try:
                report = mirror_topic(self.lake, topic.name)
            except TableAlreadyExists as error:
                # Trying at once does not help: somebody has to make room.
                LOG.warning("%s", error)
                self._note_waiting(topic.id, (topic.name, str(error)))
                return MirrorReport(topic.name, waits=str(error))
            self._note_waiting(topic.id, (topic.name, report.waits) if report.waits else None)
            entry.worth_noting = bool(report.versions or report.dropped)
            entry.detail |= asdict(report)
        with self._lock:
            self._counts["versions"] += report.versions
            self._counts["files"] += report.files
            self._counts["dropped"] += report.dropped
        return report

    def _note_waiting(self, topic_id: int, why: tuple[str, str] | None) -> None:
        with self._lock:
            self._waiting.pop(topic_id, None)
            if why is not None:
                self._waiting[topic_id] = why

    @contextmanager
    def _working(self, topic: MirroredTopic) -> Iterator[None]:
        with self._lock:
            self._at_work[topic.id] = topic.name
        try:
            yield
        finally:
            with self._lock:
                self._at_work.pop(topic.id, None)

    # --- by hand ---------------------------------------------------------------------

    def run_once(self, only: int | None = None) -> Mapping[str, Any]:
        """Mirror every topic that is to be a table, or one of them, now and in this thread."""
        mirrored: dict[str, int] = {}
        failed: dict[str, str] = {}
        for topic in self._topics():
            if only not in (None, topic.id) or self.paused(topic.table_id) is not None:
                continue
            try:
                report = self._mirror(topic, "by hand")
            except LakebookError as error:
                failed[topic.name] = str(error)
                continue
            if report.waits:
                failed[topic.name] = report.waits
            elif report.files:
                mirrored[topic.name] = report.files
        return {"mirrored": mirrored, "failed": failed}

    def _topics(self) -> Iterator[MirroredTopic]:
        after = ""
        while page := self.lake.registry.read_with(lambda reader: list_topics(reader, after, "", PAGE_SIZE)):  # noqa: B023
            for topic in page:
                found = self.lake.registry.read_with(lambda reader: mirrored_topic(reader, topic.id))  # noqa: B023
                if found is not None:
                    yield found
            after = page[-1].name
