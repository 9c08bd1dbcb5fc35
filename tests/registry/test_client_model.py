"""Whatever producers and consumers do, and upkeep meanwhile: what they hand out is what lists hold."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from books import Postgres
from lakebook.errors import OffsetBelowLogStart, OffsetRegression
from lakebook.streams.consumer import Consumer
from lakebook.streams.producer import Producer
from stream_lists import (
    HOUR,
    NUMBERS,
    OPERATIONS,
    PARTITIONS,
    SETTINGS,
    SHARES,
    TOPIC,
    Streams,
    drive,
    in_memory,
    on_postgresql,
    steps_of,
)
from streaming import PATIENCE

GROUP = "g"
#: Nobody is given up for silence, however far the clock is moved.
PATIENT = {**SETTINGS, "lease_maximum": 1e9, "poll_seconds": 1e9, "group_session": 86_400.0}


class Client:
    """A consumer, and the position in each list that it has to have."""

    def __init__(self, open_consumer: Callable[[], Consumer]) -> None:
        self._open = open_consumer
        self.consumer = open_consumer()
        self.positions: dict[int, int] = {}
        self.paused: set[int] = set()

    def begin(self) -> None:
        """A member of a group has its partitions after its first poll, and nothing was read ahead by then."""
        assert self.consumer.poll(0) == []

    def open_again(self) -> None:
        self.consumer.close()
        self.consumer = self._open()
        self.paused = set()


class Clients(Streams):
    """Drives a producer, a reader alone and a member of a group, and their lists."""

    def begin(self) -> None:
        self.topic_id = self.book.metadata.create_topic(TOPIC, PARTITIONS).id
        self.producer = self._producer()
        for number in range(PARTITIONS):
            self.append(number, [2, 3], 1)
        # The one is told of what is gone, the other goes on behind it.
        self.clients = [
            Client(lambda: self.book.consumer(TOPIC)),
            Client(lambda: self.book.consumer(TOPIC, GROUP, auto_commit=False, reset="earliest")),
        ]
        for client in self.clients:
            self._begin(client)

    def _producer(self) -> Producer:
        return self.book.producer(TOPIC, producer_id="till", linger=PATIENCE)

    def _begin(self, client: Client) -> None:
        client.begin()
        for number, log in enumerate(self.logs):
            client.positions[number] = log.start
            if client.consumer.group is not None:
                # Where a group begins is committed at once.
                committed = self.committed.setdefault((GROUP, number), log.start)
                client.positions[number] = max(committed, log.start)

    # --- writing -------------------------------------------------------------------

    def append(self, number: int, counts: list[int], late: int) -> None:
        log = self.logs[number]
        for count in counts:
            values = [f"{number}.{log.end + place}".encode() for place in range(count)]
            times = [self.now - timedelta(hours=late, seconds=place) for place in range(count)]
            if count == 2:
                table = pa.table({"value": values, "timestamp": times, "partition": [number] * count})
                pending = self.producer.send_table(table)
                self.producer.flush(PATIENCE)
                ((base, end),) = [(part.base_offset, part.end_offset) for part in pending.result(0)]
                assert (base, end) == (log.end, log.end + 1)
            else:
                rows = zip(values, times, strict=True)
                sent = [self.producer.send(value, timestamp=time, partition=number) for value, time in rows]
                self.producer.flush(PATIENCE)
                assert [one.result(0).offset for one in sent] == list(range(log.end, log.end + count))
            log.values += values
            log.times += times

    def restart_producer(self, gently: bool) -> None:
        former, self.producer = self.producer, self._producer()
        if gently:
            former.close()

    def wait(self, hours: int) -> None:
        self.clock.advance(hours * HOUR + 1)
        # Whoever reads is alive.
        self.book.lake.renewals.renew()

    # --- reading -------------------------------------------------------------------

    def poll(self, which: int, most: int) -> None:
        client = self.clients[which]
        left = {
            number: log.end - client.positions[number]
            for number, log in enumerate(self.logs)
            if number not in client.paused
        }
        found = client.consumer.poll(PATIENCE if sum(left.values()) else 0, max_records=most)
        assert min(1, sum(left.values())) <= len(found) <= most
        for record in found:
            position = client.positions[record.partition]
            log = self.logs[record.partition]
            assert record.partition not in client.paused
            assert (record.offset, record.value) == (position, log.values[position])
            assert record.timestamp == log.times[position]
            client.positions[record.partition] += 1

    def read_all(self, which: int) -> None:
        while any(
            client.positions[number] < log.end
            for client in [self.clients[which]]
            for number, log in enumerate(self.logs)
            if number not in client.paused
        ):
            self.poll(which, 100)

    def go_to(self, which: int, number: int, share: int) -> None:
        client, log = self.clients[which], self.logs[number]
        offset = log.at(share)
        if min(log.start, client.positions[number]) <= offset:
            client.consumer.seek(TOPIC, number, offset)
            client.positions[number] = offset
        elif client.consumer.group is None:
            with pytest.raises(OffsetBelowLogStart):
                client.consumer.seek(TOPIC, number, offset)
        else:
            client.consumer.seek(TOPIC, number, offset)
            assert client.consumer.skipped[-1] == (TOPIC, number, offset, log.start)
            client.positions[number] = log.start

    def go_to_an_end(self, which: int, number: int, end: str) -> None:
        client, log = self.clients[which], self.logs[number]
        client.consumer.seek(TOPIC, number, end)
        client.positions[number] = log.start if end == "beginning" else log.end

    def go_to_a_time(self, which: int, number: int, hours: int) -> None:
        client, log, moment = self.clients[which], self.logs[number], self.now - timedelta(hours=hours)
        client.consumer.seek(TOPIC, number, moment)
        later = (offset for offset in range(log.start, log.end) if log.times[offset] >= moment)
        client.positions[number] = next(later, log.end)

    def pause(self, which: int, number: int) -> None:
        client = self.clients[which]
        if number in client.paused:
            client.consumer.resume([(TOPIC, number)])
        else:
            client.consumer.pause([(TOPIC, number)])
        client.paused ^= {number}

    def commit_positions(self) -> None:
        client = self.clients[1]
        if any(client.positions[number] < self.committed[GROUP, number] for number in client.positions):
            # All or none.
            with pytest.raises(OffsetRegression):
                client.consumer.commit()
            return
        client.consumer.commit()
        self.committed |= {(GROUP, number): offset for number, offset in client.positions.items()}

    def restart_consumer(self, which: int) -> None:
        client = self.clients[which]
        client.open_again()
        self._begin(client)

    # --- always --------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        for client in self.clients:
            assert client.consumer.position() == {(TOPIC, number): at for number, at in client.positions.items()}
            lag = {(TOPIC, number): self.logs[number].end - at for number, at in client.positions.items()}
            assert client.consumer.lag() == lag

    def end(self) -> None:
        for which, client in enumerate(self.clients):
            client.consumer.resume()
            client.paused = set()
            self.read_all(which)
            client.consumer.close()
        self.producer.close()
        super().end()


WHICH = st.integers(0, 1)
UPKEEP = [name for name in OPERATIONS if name in ("append", "wait", "merge", "remove", "clean") or "retain" in name]
#: What may happen, and to what.
STEPS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    **{name: OPERATIONS[name] for name in UPKEEP},
    "restart_producer": {"gently": st.booleans()},
    "poll": {"which": WHICH, "most": st.integers(1, 7)},
    "read_all": {"which": WHICH},
    "go_to": {"which": WHICH, "number": NUMBERS, "share": SHARES},
    "go_to_an_end": {"which": WHICH, "number": NUMBERS, "end": st.sampled_from(["beginning", "end"])},
    "go_to_a_time": {"which": WHICH, "number": NUMBERS, "hours": st.sampled_from([0, 1, 5])},
    "pause": {"which": WHICH, "number": NUMBERS},
    "commit_positions": {},
    "restart_consumer": {"which": WHICH},
}
# What is most at odds with each other happens more often.
OFTEN = ("append", "poll", "poll", "merge", "clean", "go_to")


def test_clients_in_memory_hand_out_what_lists_hold() -> None:
    drive(Clients, steps_of(STEPS, OFTEN), in_memory(PATIENT), 12)


def test_clients_on_postgresql_hand_out_what_lists_hold(postgres: Postgres, tmp_path: Path) -> None:
    with on_postgresql(postgres, tmp_path, PATIENT) as open_book:
        drive(Clients, steps_of(STEPS, OFTEN), open_book, 3)
