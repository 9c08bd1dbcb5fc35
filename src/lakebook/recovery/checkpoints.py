"""Checkpoints in the warehouse: what a rebuild needs and the files do not tell, of one moment.

    checkpoints/<time>-<id>.lbc     compressed lines of JSON

The first line says whose it is, then each registry table follows with a line that names its columns and one
line per row, and the last line has their number and a checksum over all of them: one that is torn is noticed.
A checkpoint is written once; the newest few are kept.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
import pyarrow as pa
import xxhash

from lakebook import failpoints
from lakebook.clock import to_datetime, to_ms
from lakebook.errors import InvalidCheckpoint, LakebookError, ObjectNotFound, RegistryBusy
from lakebook.lake.lake import Lake
from lakebook.registry.checkpoints import changes_of, checkpoint_rows, identity_of
from lakebook.registry.migrate import HEAD
from lakebook.registry.registry import Registry
from lakebook.registry.transactions import Reader, new_id
from lakebook.storage.answers import NO_ANSWER
from lakebook.storage.objects import ObjectStore

#: Where they lie.
CHECKPOINTS = "checkpoints"
_END = ".lbc"
_FORMAT = 1
_CODEC = "zstd"
# Of two janitors one gives way; a third is rare.
_TRIES = 5
_TIME = "%Y%m%dT%H%M%S"
_NAME = re.compile(r"([0-8][0-9]{7}T[0-9]{6})\.([0-9]{3})Z-[0-9a-f]+\.lbc", re.ASCII)


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written."""

    path: str
    size: int
    rows: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read."""

    path: str
    #: When it was taken.
    at: int
    book_id: str
    epoch: str
    created_at: int
    revision: str
    #: By registry table: the names of its columns, and its rows.
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, list[list[Any]]] = field(default_factory=dict)

    @property
    def moment(self) -> datetime:
        """When it was taken."""
        return to_datetime(self.at)

    def of(self, table: str) -> Iterator[dict[str, Any]]:
        """The rows of a registry table."""
        names = self.columns.get(table, [])
        return (dict(zip(names, row, strict=True)) for row in self.rows.get(table, []))


def write_checkpoint(lake: Lake) -> Written:
    """Write a checkpoint of the book as it is now."""
    for _ in range(_TRIES):
        before = list_checkpoints(lake.store)
        now = lake.clock.now_ms()
        data, rows = lake.registry.in_snapshot(lambda reader: _encoded(reader, lake.registry, now))  # noqa: B023 - at once
        # One that another janitor has written meanwhile may be of a newer state, and must not become the older one.
        if set(list_checkpoints(lake.store)) <= set(before):
            break
    else:
        raise RegistryBusy("others write checkpoints all the time", on=CHECKPOINTS, remedy="Try again later")
    # Their names never run backwards, whatever the clocks of hosts do: else each one that is written after one of a
    # host whose clock was ahead would count as older.
    at = to_datetime(max([now, *(time + 1 for time in map(_time_in, before) if time is not None)]))
    path = f"{CHECKPOINTS}/{at:{_TIME}}.{at.microsecond // 1000:03d}Z-{new_id()}{_END}"
    lake.store.put_new(path, data)
    failpoints.reach("checkpoint.written")
    return Written(path, len(data), rows)


def state_of(lake: Lake) -> tuple[int, ...]:
    """Numbers that are others when a new checkpoint would be another one."""
    return lake.registry.read_with(changes_of)


def forget_checkpoints(store: ObjectStore, kept: int, written: str) -> int:
    """Delete all but the newest checkpoints; how many. What cannot be deleted now, the next call deletes.

    The one that was just `written` stays, whatever else lies there.
    """
    gone = [path for path in list_checkpoints(store) if path != written][kept - 1 :]
    failures = store.delete(gone)
    return len(gone) - len(failures)


def list_checkpoints(store: ObjectStore) -> list[str]:
    """The paths of all checkpoints, the newest first.

    By their names, which a copy of the warehouse keeps: the dates of a store would be those of the copy.
    """
    found = (item.path for item in store.list(CHECKPOINTS))
    return sorted((path for path in found if _time_in(path) is not None), reverse=True)


def is_checkpoint(path: str) -> bool:
    """Whether an object is called as a checkpoint is."""
    return path.startswith(f"{CHECKPOINTS}/") and _time_in(path) is not None


def _time_in(path: str) -> int | None:
    """The time that the name of a checkpoint tells; none if it is not the name of one."""
    name = _NAME.fullmatch(path.removeprefix(f"{CHECKPOINTS}/"))
    if name is None:
        return None
    try:
        return to_ms(datetime.strptime(name[1], _TIME).replace(tzinfo=UTC)) + int(name[2])
    except ValueError:
        return None  # There is no such day.


def newest_checkpoint(store: ObjectStore, refused: Callable[[str, str], None]) -> Checkpoint | None:
    """The newest checkpoint that can be read; `refused` is told of each newer one, and why it cannot."""
    for path in list_checkpoints(store):
        try:
            return read_checkpoint(store, path)
        except ObjectNotFound:
            continue  # A janitor of the former life has removed it meanwhile.
        except NO_ANSWER:
            raise  # It may be whole, and an older one knows less.
        except LakebookError as error:
            refused(path, error.what)
    return None


# --- the file ------------------------------------------------------------------


class _Lines:
    """Compressed lines, their number and their checksum."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._out = pa.CompressedOutputStream(pa.PythonFile(self._buffer, "w"), _CODEC)
        self._sum = xxhash.xxh3_64()
        self.rows = 0

    def add(self, values: Sequence[Any]) -> None:
        lines = b"".join(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE) for value in values)
        self._sum.update(lines)
        self._out.write(lines)

    def finish(self) -> bytes:
        self._out.write(orjson.dumps({"rows": self.rows, "checksum": self._sum.hexdigest()}) + b"\n")
        # It closes the buffer too.
        self._out.flush()
        close = self._buffer.close
        self._buffer.close = lambda: None  # type: ignore[method-assign]
        self._out.close()
        data = self._buffer.getvalue()
        close()
        return data


def _encoded(reader: Reader, registry: Registry, now: int) -> tuple[bytes, int]:
    identity = identity_of(reader)
    if registry.epoch and identity.epoch != registry.epoch:
        raise registry.epoch_changed()  # The state of a former life is nothing to come back to.
    lines = _Lines()
    head = {"lakebook": "checkpoint", "format": _FORMAT, "revision": HEAD, "at": now}
    lines.add([{**head, "book_id": identity.book_id, "epoch": identity.epoch, "created_at": identity.created_at}])
    for rows in checkpoint_rows(reader):
        lines.add([{"table": rows.table, "columns": rows.columns}])
        for page in rows.pages():
            lines.add(page)
            lines.rows += len(page)
    return lines.finish(), lines.rows


def read_checkpoint(store: ObjectStore, path: str) -> Checkpoint:
    """A checkpoint by its path; one that is torn or damaged is refused as a whole."""
    data = store.read(path)
    try:
        return _decoded(path, data)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise InvalidCheckpoint(
            f"it is torn or damaged ({type(error).__name__})", on=path, remedy="An older one is used instead"
        ) from None


def _decoded(path: str, data: bytes) -> Checkpoint:
    with pa.CompressedInputStream(pa.BufferReader(data), _CODEC) as stream:
        content = stream.read()
    body, _, last = content.rstrip(b"\n").rpartition(b"\n")
    end = orjson.loads(last)
    lines = body.split(b"\n")
    head = orjson.loads(lines[0])
    if head["lakebook"] != "checkpoint" or end["checksum"] != xxhash.xxh3_64_hexdigest(body + b"\n"):
        raise ValueError("its checksum is another")
    if head["format"] > _FORMAT:
        raise InvalidCheckpoint(
            f"it has format {head['format']}", on=path, remedy="Use the version of Lakebook that wrote it"
        )
    found = Checkpoint(path, head["at"], head["book_id"], head["epoch"], head["created_at"], head["revision"])
    into: list[list[Any]] = []
    for line in lines[1:]:
        value = orjson.loads(line)
        if isinstance(value, dict):
            found.columns[value["table"]] = value["columns"]
            into = found.rows.setdefault(value["table"], [])
        else:
            into.append(value)
    return found
