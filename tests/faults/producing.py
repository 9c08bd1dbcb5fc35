"""What producing processes of the fault tests do: send, and tell what they will send and what was acknowledged."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import lakebook
from lakebook import Book, failpoints
from segment_logs import log_of
from table_writers import Line

TOPIC, PARTITIONS = "orders", 2
#: Where a producer comes by.
POINTS = ("produce.stamped", "produce.stored", "produce.committed", "produce.releasing")
#: Inside of every upload: all bytes are written, and nobody sees them yet.
UPLOAD = "object.written"
#: Nobody waits long for one who is dead.
IMPATIENT: dict[str, Any] = {"append_turn": 0.5, "producer_linger": 0.0}
_ROUND = 10


def produce(
    line: Line,
    target: str,
    settings: Mapping[str, Any],
    life: str,
    *,
    producer_id: str | None = None,
    partitions: int = PARTITIONS,
    rounds: int = 1_000_000,
    frozen_at: int = 0,
) -> None:
    """Send records until told to stop. With `frozen_at` the process stops itself with its n-th file just stored."""
    stored = 0

    def freeze() -> None:
        nonlocal stored
        stored += 1
        if stored == frozen_at:
            # To this very thread: else it goes on for a moment, and may be stopped inside of a transaction.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    if frozen_at:
        failpoints._armed["produce.stored"] = freeze
    number = 0
    with lakebook.open(target, **settings) as book, book.producer(TOPIC, producer_id=producer_id) as producer:
        line.tell("ready")
        for _ in range(rounds):
            if line.stopped():
                break
            texts = [f"{life}:{number + more}" for more in range(_ROUND)]
            line.tell("sending", texts)
            sent = [producer.send(text, partition=at % partitions) for at, text in enumerate(texts, number)]
            for text, one in zip(texts, sent, strict=True):
                ack = one.result(60)
                line.tell("acknowledged", text, ack.partition, ack.offset)
            number += _ROUND
    line.tell("done")


class Told:
    """What producers told, to be compared with what the topic holds."""

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self.acknowledged: dict[tuple[int, int], str] = {}

    def take(self, facts: Iterable[tuple[Any, ...]]) -> None:
        """Listen."""
        for kind, *rest in facts:
            if kind == "sending":
                self._sent.update(rest[0])
            elif kind == "acknowledged":
                text, partition, offset = rest
                assert self.acknowledged.setdefault((partition, offset), text) == text

    def check(self, book: Book) -> None:
        """What was acknowledged is there; nothing is there twice, out of order, or without having been sent."""
        seen: set[str] = set()
        for partition in range(PARTITIONS):
            log = [(offset, (value or b"").decode()) for offset, value in log_of(book, TOPIC, partition)]
            assert [offset for offset, _ in log] == list(range(len(log)))
            newest: dict[str, int] = {}
            for offset, text in log:
                assert self.acknowledged.get((partition, offset), text) == text
                life, _, number = text.partition(":")
                assert text in self._sent
                assert newest.get(life, -1) < int(number), text
                newest[life] = int(number)
                seen.add(text)
        assert set(self.acknowledged.values()) <= seen
        checked = book.verify()
        assert checked.ok, checked.findings
