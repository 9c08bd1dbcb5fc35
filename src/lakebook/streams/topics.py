"""The topics of a book, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from lakebook.lake.lake import Lake
from lakebook.names import check_name
from lakebook.pages import every
from lakebook.registry.topics import not_found
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.topic import Reads, Topic

if TYPE_CHECKING:
    from lakebook.streams.consumer import Consumer
    from lakebook.streams.producer import Producer


class Topics:
    """The live topics of a book: `topics["orders"]`."""

    def __init__(
        self,
        lake: Lake,
        metadata: MetadataStore,
        *,
        producer: Callable[..., Producer],
        consumer: Callable[..., Consumer],
    ) -> None:
        self._lake = lake
        self._metadata = metadata
        self._producer, self._consumer = producer, consumer
        self._reads = Reads()

    def __getitem__(self, name: str) -> Topic:
        if self._metadata.get_topic(name) is None:
            raise not_found(name)
        return self._topic(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._metadata.get_topic(name) is not None

    def __iter__(self) -> Iterator[str]:
        """The names of all topics, in order."""
        return (topic.name for topic in every(lambda after: self._metadata.list_topics(after=after)))

    def _topic(self, name: str) -> Topic:
        return Topic(self._lake, self._metadata, name, self._reads, producer=self._producer, consumer=self._consumer)

    def create(
        self,
        name: str,
        partitions: int = 1,
        *,
        retention_ms: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Topic:
        """Create a topic with its partitions."""
        self._metadata.create_topic(check_name("topic", name), partitions, retention_ms=retention_ms, config=config)
        return self._topic(name)

    def delete(self, name: str) -> None:
        """Delete a topic: gone at once for readers; its files go when their grace has passed."""
        self._metadata.delete_topic(name)

    def release_reads(self) -> None:
        """Let go of what `Topic.read` has pinned; its frames are good no more."""
        self._reads.release()
