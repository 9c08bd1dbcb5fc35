"""The file of a backup: all rows of a registry at one moment, as lines of JSON, packed by gzip.

    {"format": "lakebook-backup", "version": 1, "revision": …, "book_id": …, "epoch": …, …}
    {"table": "topics", "columns": [["id", "integer"], ["name", "text"], …]}
    [1, "orders", …]
    …
    {"end": {"rows": {"topics": 1, …}, "checksum": "xxh3:…"}}

Lines, and not a form of Lakebook's own: `zcat` shows them, they are read and written row by row, and they will be
legible when no Lakebook is at hand. A line with `table` says which columns follow, and of which kind they are: bytes
stand as Base64, JSON as its text, floating numbers as the text that gives them back exactly. The last line counts
the rows and has the checksum of all lines before it. A file without it is not a backup.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

import orjson
import xxhash

from lakebook import failpoints
from lakebook.errors import BackupInvalid, BackupNotWritable

FORMAT = "lakebook-backup"
VERSION = 1

INTEGER, BOOLEAN, FLOAT, TEXT, JSON, BYTES = "integer", "boolean", "float", "text", "json", "bytes"
_KINDS = (INTEGER, BOOLEAN, FLOAT, TEXT, JSON, BYTES)

_LEVEL = 1  # Of gzip: more would halve the speed for a tenth of the size.
_BUFFER = 1 << 20
# No line that was written here is longer: a footer has at most 2 GiB. It keeps a foreign file from filling the memory.
_LONGEST_LINE = 3 << 30

Row: TypeAlias = Sequence[Any]
#: How a place is opened to read a backup from its beginning.
Opener: TypeAlias = Callable[[], BinaryIO]


@dataclass(frozen=True)
class Column:
    """A column of a table in a backup."""

    name: str
    kind: str


@dataclass(frozen=True)
class Header:
    """What a backup says of itself."""

    revision: str
    book_id: str
    epoch: str
    #: What the registry records as the place of the bytes, and where that was.
    recorded: str
    warehouse: str
    created_at: int
    taken_at: int
    #: Which kind of database it was taken from.
    database: str
    #: Of tables that count their ids: the last that was given.
    positions: dict[str, int] = field(default_factory=dict)
    #: When it was taken by the clock of the store; none where that could not be asked.
    store_at: int | None = None


@dataclass(frozen=True)
class Summary:
    """What a whole backup has in it."""

    header: Header
    rows: dict[str, int]
    checksum: str


# --- writing -------------------------------------------------------------------


class BackupWriter:
    """Writes the lines of a backup."""

    def __init__(self, file: IO[bytes], header: Header) -> None:
        # Without a time: the same rows make the same file.
        self._packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0)
        self._digest = xxhash.xxh3_64()
        #: Rows that were written, by table.
        self.rows: dict[str, int] = {}
        self._lines: list[bytes] = []
        self._size = 0
        self._header = header
        self._line({"format": FORMAT, "version": VERSION, **vars(header)})

    def table(self, name: str, columns: Sequence[Column], rows: Iterator[Row], progress: Callable[[int], None]) -> None:
        """Write all rows of a table; `progress` hears how many of them are written, now and then."""
        self._line({"table": name, "columns": [[column.name, column.kind] for column in columns]})
        writers = [_WRITTEN.get(column.kind) for column in columns]
        special = [(number, writer) for number, writer in enumerate(writers) if writer is not None]
        count = 0
        for row in rows:
            values = list(row)
            for number, writer in special:
                if values[number] is not None:
                    values[number] = writer(values[number])
            self._line(values)
            count += 1
            if count % 10_000 == 0:
                progress(count)
        self.rows[name] = count
        failpoints.reach("backup.table_written")

    def end(self) -> Summary:
        """Write the last line."""
        self._flush()
        summary = Summary(self._header, self.rows, f"xxh3:{self._digest.hexdigest()}")
        self._packed.write(orjson.dumps({"end": {"rows": summary.rows, "checksum": summary.checksum}}) + b"\n")
        self._packed.close()
        return summary

    def _line(self, value: Any) -> None:
        line = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        text = b"".join(self._lines)
        self._lines, self._size = [], 0
        self._digest.update(text)
        self._packed.write(text)


_WRITTEN: dict[str, Callable[[Any], Any]] = {
    BYTES: lambda value: b64encode(value).decode("ascii"),
    BOOLEAN: bool,
    FLOAT: lambda value: float(value).hex(),
}
_READ: dict[str, Callable[[Any], Any]] = {
    BYTES: lambda value: b64decode(value, validate=True),
    FLOAT: float.fromhex,
}
_EXPECTED: dict[str, type] = {INTEGER: int, BOOLEAN: bool, FLOAT: str, TEXT: str, JSON: str, BYTES: str}


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that appears under its name when the block ends, whole and durable; nothing is ever replaced."""
    final = Path(path).absolute()
    partial = final.with_name(f"{final.name}.partial")
    try:
        if final.exists():
            raise FileExistsError(17, "there is a file already")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        raise _not_writable(final, error) from None
    with open(descriptor, "wb") as file:
        try:
            # What another one left that was killed is written over; one that is at work holds the lock.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
        except OSError as error:
            raise _not_writable(final, error) from None
        try:
            yield file
            file.flush()
            os.fsync(descriptor)
            failpoints.reach("backup.written")
            os.link(partial, final)
            _sync_folder(final.parent)
        except OSError as error:
            raise _not_writable(final, error) from None
        finally:
            with suppress(OSError):
                os.unlink(partial)


def _not_writable(path: Path, error: OSError | ValueError) -> BackupNotWritable:
    return BackupNotWritable(
        f"it cannot be written ({_reason(error)})", on=str(path), remedy="Name a new file in a folder with enough room"
    )


def _reason(error: OSError | ValueError) -> str:
    # A name that no file can have, such as one with a NUL in it, does not come as far as the system.
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading -------------------------------------------------------------------


class BackupReader:
    """Reads a backup from its first line to its last; what is wrong with it is a `BackupInvalid`."""

    def __init__(self, opener: Opener, shown: str) -> None:
        self._opener = opener
        self._shown = shown
        self._digest = xxhash.xxh3_64()
        self._rows: dict[str, int] = {}

    def check(self, progress: Callable[[int], None] = lambda rows: None) -> Summary:
        """Read all of it, and say what is in it."""
        count = 0
        with self.opened() as (header, tables):
            for _, _, rows in tables:
                for _ in rows:
                    count += 1
                    if count % 10_000 == 0:
                        progress(count)
        return Summary(header, dict(self._rows), f"xxh3:{self._digest.hexdigest()}")

    @contextmanager
    def opened(self) -> Iterator[tuple[Header, Iterator[tuple[str, list[Column], Iterator[Row]]]]]:
        """The header, and the tables one after the other, each with its rows, which are to be used in that order."""
        self._digest = xxhash.xxh3_64()
        self._rows = {}
        try:
            file = self._opener()
        except (OSError, ValueError) as error:
            raise self._invalid(f"it cannot be read ({_reason(error)})") from None
        with file, gzip.GzipFile(fileobj=file, mode="rb") as packed:
            lines = self._lines(packed)
            header = self._header(next(lines, b""))
            yield header, self._tables(lines)

    def _lines(self, packed: gzip.GzipFile) -> Iterator[bytes]:
        try:
            while line := packed.readline(_LONGEST_LINE):
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._invalid(f"it is cut short or damaged ({error})") from None
        except OSError as error:
            raise self._invalid(f"it cannot be read ({_reason(error)})") from None

    def _header(self, line: bytes) -> Header:
        said = self._parsed(line)
        if not isinstance(said, dict) or said.pop("format", None) != FORMAT:
            raise self._invalid("it is no backup of a book")
        version = said.pop("version", None)
        if version != VERSION:
            raise self._invalid(f"it is a backup of form {version}, and this version of Lakebook knows {VERSION}")
        self._digest.update(line)
        try:
            return Header(**said)
        except TypeError:
            raise self._invalid("its first line is not that of a backup") from None

    def _tables(self, lines: Iterator[bytes]) -> Iterator[tuple[str, list[Column], Iterator[Row]]]:
        following: list[bytes] = []
        for first in lines:
            line: bytes | None = first
            while line is not None:
                said = self._parsed(line)
                if isinstance(said, dict) and "end" in said:
                    self._check_end(said["end"], lines)
                    return
                name, columns = self._table(said)
                self._digest.update(line)
                self._rows[name] = 0
                following.clear()
                yield name, columns, self._rows_of(name, columns, lines, following)
                line = following[0] if following else None
        raise self._invalid("it is cut short: its last line is missing")

    def _table(self, said: Any) -> tuple[str, list[Column]]:
        try:
            name, columns = said["table"], [Column(*item) for item in said["columns"]]
        except (TypeError, KeyError):
            raise self._invalid("a line is none of a backup") from None
        if name in self._rows or not all(column.kind in _KINDS for column in columns):
            raise self._invalid("a line is none of a backup")
        return name, columns

    def _rows_of(
        self, name: str, columns: list[Column], lines: Iterator[bytes], following: list[bytes]
    ) -> Iterator[Row]:
        expected = [_EXPECTED[column.kind] for column in columns]
        special = [(number, _READ[column.kind]) for number, column in enumerate(columns) if column.kind in _READ]
        for line in lines:
            if line.startswith(b"{"):
                following.append(line)
                return
            values = self._parsed(line)
            if not isinstance(values, list) or len(values) != len(expected):
                raise self._invalid(f"a row of {name} has not its columns")
            for value, kind in zip(values, expected, strict=True):
                if value is not None and type(value) is not kind:
                    raise self._invalid(f"a row of {name} has a value of another kind")
            try:
                for number, read in special:
                    if values[number] is not None:
                        values[number] = read(values[number])
            except ValueError:
                raise self._invalid(f"a row of {name} has a value of another kind") from None
            self._digest.update(line)
            self._rows[name] += 1
            yield values

    def _check_end(self, end: Any, lines: Iterator[bytes]) -> None:
        if end != {"rows": self._rows, "checksum": f"xxh3:{self._digest.hexdigest()}"}:
            raise self._invalid("its rows are not those that it counts: it was changed or damaged")
        if next(lines, None) is not None:
            raise self._invalid("something follows its last line")

    def _parsed(self, line: bytes) -> Any:
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            raise self._invalid("it is no backup of a book" if not self._rows else "a line is damaged") from None

    def _invalid(self, what: str) -> BackupInvalid:
        return BackupInvalid(what, on=self._shown, remedy="Use a backup that `lakebook backup` has finished")


def backup_at(path: str | os.PathLike[str]) -> BackupReader:
    """The backup in a file."""
    return BackupReader(lambda: open(path, "rb"), os.fspath(path))
