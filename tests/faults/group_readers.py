"""What the readers of one group do, each in a process of its own: read, tell, and only then commit."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import lakebook
from lakebook.errors import GenerationFenced, MemberRemoved
from table_writers import Line

TOPIC, GROUP, PARTITIONS = "orders", "readers", 6
#: A member that is silent for a second is gone.
SETTINGS: dict[str, Any] = {"group_session": 1.0, "lease_seconds": 2.0, "lock_timeout": 60}


def read_for_group(line: Line, target: str, settings: Mapping[str, Any], name: str) -> None:
    """Read until told to stop. After the record that names it, it freezes itself before it commits."""
    with (
        lakebook.open(target, **settings) as book,
        book.consumer(TOPIC, GROUP, auto_commit=False, on_assigned=lambda places: line.tell("assigned", places)) as own,
    ):
        while not line.stopped():
            records = own.poll(0.1)
            if records:
                line.tell("read", [(record.partition, record.offset) for record in records])
            if any(record.value == f"freeze {name}".encode() for record in records):
                os.kill(os.getpid(), signal.SIGSTOP)
                line.tell("woken")
            try:
                own.commit()
            except (GenerationFenced, MemberRemoved) as error:
                line.tell("refused", type(error).__name__)
    line.tell("done")
