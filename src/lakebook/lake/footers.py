"""Parquet footers as the registry keeps them: checked, brought up to date, and opened.

A footer is the `FileMetaData` structure at the end of a Parquet file, in Thrift's compact
protocol, without the file's length and magic. Its recorded version says who wrote it:

    2    the footer as it stands in the file; nothing is done to it
    1    by older writers: no row count, and pointers to column and offset indexes that are
         no longer valid; on load the count is put in and the pointers are taken out

The upgrade copies all other bytes as they are, known to it or not. Nothing is decoded and
encoded again but the header of a field whose predecessor came or went: in the compact
protocol a header counts from the field before it.

A footer may be large, and most of it are column chunks, so a chunk of the usual shape is
found with one regular expression, and only the others are walked through value by value.
Both read the same language, and both take time in proportion to the bytes, whatever they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lakebook.errors import CorruptFooter, InvalidInput, UnknownFooterVersion
from lakebook.names import shown

#: The version that is written.
FOOTER_VERSION = 2
#: The version of the older writers.
LEGACY_FOOTER_VERSION = 1

#: A Parquet file ends with the footer's length and the magic.
TAIL_BYTES = 8
MAGIC = b"PAR1"
_ENCRYPTED_MAGIC = b"PARE"
_SIGNATURE_BYTES = 28
_MAX_ROWS = 2**63 - 1
_AGAIN = "Record the footer again from the file"
_CHECK_FILE = "Check that it is a Parquet file and was written to its end"


class FooterPlace(NamedTuple):
    """Where in a Parquet file its footer is."""

    offset: int
    length: int


def upgraded(metadata: bytes, version: int, num_rows: int, *, on: str = "") -> bytes:
    """A footer of any version that was ever recorded, as one of today's."""
    if version == FOOTER_VERSION:
        return metadata
    if version == LEGACY_FOOTER_VERSION:
        return parse_legacy_and_upgrade(metadata, num_rows, on=on)
    raise UnknownFooterVersion(
        f"its footer has version {shown(version)}, and the known ones are {LEGACY_FOOTER_VERSION} and {FOOTER_VERSION}",
        on=on,
        remedy="Use the version of Lakebook that recorded it, or a newer one",
    )


def parse_legacy_and_upgrade(metadata: bytes, num_rows: int, *, on: str = "") -> bytes:
    """A footer of version 1 as one of version 2: with its row count, without index pointers."""
    if not isinstance(num_rows, int) or isinstance(num_rows, bool) or not 0 <= num_rows <= _MAX_ROWS:
        raise InvalidInput(f"{shown(num_rows)} is not a number of rows", on=on)
    with _reading(on):
        return _rewrite(metadata, num_rows)


def strip_column_index_info(metadata: bytes, *, on: str = "") -> bytes:
    """A footer without pointers to column and offset indexes; all else stays as it is."""
    with _reading(on):
        return _rewrite(metadata, None)


def read_num_rows(metadata: bytes, *, on: str = "") -> int | None:
    """The row count that a footer states, if it does. What comes after it is not looked at."""
    with _reading(on):
        position = number = 0
        while True:
            kind, number, position = _field(metadata, position, number)
            if kind == _STOP:
                return None
            if number == _FILE_NUM_ROWS:
                return _num_rows(metadata, kind, position)
            position = _skip(metadata, position, kind)


def footer_of_tail(tail: bytes, file_size: int, *, on: str = "") -> FooterPlace:
    """Where the footer is, from the last bytes of a Parquet file: eight, or more."""
    length_and_magic = tail[-TAIL_BYTES:]
    magic = length_and_magic[4:]
    if len(length_and_magic) < TAIL_BYTES or file_size < len(MAGIC) + TAIL_BYTES:
        raise CorruptFooter("the file is too short to be a Parquet file", on=on, remedy=_CHECK_FILE)
    if magic == _ENCRYPTED_MAGIC:
        raise CorruptFooter(
            "the file's footer is encrypted and cannot be read", on=on, remedy="Write the file with a plaintext footer"
        )
    if magic != MAGIC:
        raise CorruptFooter(
            f"the file ends with {shown(magic)}, and a Parquet file with {shown(MAGIC)}", on=on, remedy=_CHECK_FILE
        )
    length = int.from_bytes(length_and_magic[:4], "little")
    offset = file_size - TAIL_BYTES - length
    if length == 0:
        raise CorruptFooter("the file's footer is empty", on=on, remedy=_CHECK_FILE)
    if offset < len(MAGIC):
        raise CorruptFooter(
            f"the footer's length is {length} bytes, and the file has only {file_size}", on=on, remedy=_CHECK_FILE
        )
    return FooterPlace(offset, length)


def as_parquet_file(metadata: bytes) -> bytes:
    """A footer as a Parquet file without data, for whoever opens files only."""
    return b"".join((MAGIC, metadata, len(metadata).to_bytes(4, "little"), MAGIC))


def open_footer(metadata: bytes, *, on: str = "") -> pq.FileMetaData:
    """A footer as PyArrow's metadata: schema, row groups, statistics."""
    try:
        return pq.read_metadata(pa.BufferReader(as_parquet_file(metadata)))
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorruptFooter(f"the footer cannot be opened ({reason[:200]})", on=on, remedy=_AGAIN) from None


# --- the rewriting ---------------------------------------------------------------

# FileMetaData
_FILE_NUM_ROWS = 3
_FILE_ROW_GROUPS = 4
_FILE_ENCRYPTION = 8
# RowGroup
_GROUP_COLUMNS = 1
# ColumnChunk: offset_index_offset, offset_index_length, column_index_offset, column_index_length
_FIRST_POINTER = 4
_LAST_POINTER = 7

_TOO_EARLY = "the footer ends too early"
_TOO_LONG = "the footer has a number of more than 64 bits"


class _Malformed(Exception):
    """The bytes are not a structure in the compact protocol, or not a footer."""


@contextmanager
def _reading(on: str) -> Iterator[None]:
    """Tell of malformed bytes as the caller knows them."""
    try:
        yield
    except _Malformed as error:
        raise CorruptFooter(str(error), on=on, remedy=_AGAIN) from None
    except IndexError:  # Every read ends here that goes beyond the end.
        raise CorruptFooter(_TOO_EARLY, on=on, remedy=_AGAIN) from None


class _Copy:
    """A copy of some bytes that leaves out a few and puts in others."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.view = memoryview(source)
        self.out = bytearray()
        #: How far the source is settled: copied or left out.
        self.done = 0

    def replace(self, start: int, end: int, new: bytes = b"") -> None:
        """Copy up to `start`, and go on at `end`."""
        self.out += self.view[self.done : start]
        self.out += new
        self.done = end

    def finish(self) -> None:
        """Copy the rest."""
        self.replace(len(self.source), len(self.source))


def _rewrite(metadata: bytes, num_rows: int | None) -> bytes:
    """Take out the index pointers and, where the row count is given, see that it is there."""
    copy = _Copy(metadata)
    position = number = 0
    stated = signed = False
    # The first field behind where the row count belongs: its place in the copy, what it needs
    # in front of it, and its header. A count may still follow, so it is put in at the end only.
    gap: tuple[int, bytes, int] | None = None
    while True:
        start, previous = position, number
        kind, number, position = _field(metadata, position, previous)
        if num_rows is not None and gap is None and (kind == _STOP or number > _FILE_NUM_ROWS):
            copy.replace(start, start)
            count = _header(_I64, _FILE_NUM_ROWS, previous) + _varint_of(num_rows << 1)
            # A header in the long form names the field itself and stays.
            if metadata[start] > _LONG_FORM:
                gap = len(copy.out), count + _header(kind, number, _FILE_NUM_ROWS), 1
            else:
                gap = len(copy.out), count, 0
        if kind == _STOP:
            break
        if number == _FILE_NUM_ROWS:
            found = _num_rows(metadata, kind, position)
            if num_rows is not None and found != num_rows:
                raise _Malformed(f"the footer states {found} rows, and {num_rows} are recorded")
            stated = True
        signed = signed or number == _FILE_ENCRYPTION
        position = _row_groups(copy, position, kind) if number == _FILE_ROW_GROUPS else _skip(metadata, position, kind)
    after = len(metadata) - position
    if signed and after == _SIGNATURE_BYTES:
        raise _Malformed("the footer is signed, so that it cannot be changed")
    if after:
        raise _Malformed(f"the footer's structure ends at byte {position} of {len(metadata)}")
    if copy.done == 0 and (num_rows is None or stated):
        return metadata
    copy.finish()
    if gap is not None and not stated:
        place, new, replaced = gap
        copy.out[place : place + replaced] = new
    return bytes(copy.out)


def _num_rows(metadata: bytes, kind: int, position: int) -> int:
    if kind != _I64:
        raise _Malformed(f"the footer's row count has the type {kind}")
    value, _ = _varint(metadata, position)
    if value & 1:
        raise _Malformed("the footer's row count is negative")
    return value >> 1


def _row_groups(copy: _Copy, position: int, kind: int) -> int:
    source = copy.source
    count, position = _structures(source, position, kind, "row groups")
    for _ in range(count):
        number = 0
        while True:
            kind, number, position = _field(source, position, number)
            if kind == _STOP:
                break
            position = _chunks(copy, position, kind) if number == _GROUP_COLUMNS else _skip(source, position, kind)
    return position


def _chunks(copy: _Copy, position: int, kind: int) -> int:
    source, out, view = copy.source, copy.out, copy.view
    usual = _usual_chunk()
    count, position = _structures(source, position, kind, "column chunks")
    for _ in range(count):
        match = usual(source, position)
        if match is None:
            position = _chunk(copy, position)
            continue
        # The pointers, and then the end of the chunk.
        start, end = match.span(1)
        if start != end:
            out += view[copy.done : start]
            copy.done = end
        position = end + 1
    return position


def _chunk(copy: _Copy, position: int) -> int:
    """A chunk of any shape."""
    source = copy.source
    number = kept = 0
    while True:
        start, previous = position, number
        kind, number, position = _field(source, start, previous)
        if kind == _STOP:
            return position
        position = _skip(source, position, kind)
        if _FIRST_POINTER <= number <= _LAST_POINTER:
            copy.replace(start, position)
            continue
        if kept != previous and source[start] > _LONG_FORM:
            copy.replace(start, start + 1, _header(kind, number, kept))
        kept = number


# --- the compact protocol --------------------------------------------------------

# The types of a field; of an element too, but that both kinds of boolean take a byte there.
_STOP = 0
_TRUE = 1
_FALSE = 2
_BYTE = 3
_I16 = 4
_I32 = 5
_I64 = 6
_DOUBLE = 7
_BINARY = 8
_LIST = 9
_SET = 10
_MAP = 11
_STRUCT = 12
_UUID = 13

_VARINTS = (_I16, _I32, _I64)
_WIDTHS = {_TRUE: 0, _FALSE: 0, _BYTE: 1, _DOUBLE: 8, _UUID: 16}
_ELEMENT_WIDTHS = {**_WIDTHS, _TRUE: 1, _FALSE: 1}
# A header up to here has no step from the field before: it is the end, or the number follows.
_LONG_FORM = 15
_MAX_NUMBER = 2**15 - 1
_MAX_VARINT = 10
# As deep as Thrift's own readers go.
_MAX_DEPTH = 64


def _varint(source: bytes, position: int) -> tuple[int, int]:
    """An unsigned number of at most 64 bits, and where it ends."""
    byte = source[position]
    position += 1
    if byte < 0x80:
        return byte, position
    value = byte & 0x7F
    for shift in range(7, 70, 7):
        byte = source[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, position
    raise _Malformed(_TOO_LONG)


def _varint_of(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _field(source: bytes, position: int, previous: int) -> tuple[int, int, int]:
    """A field's type and number, and where its value begins."""
    byte = source[position]
    position += 1
    kind = byte & 0x0F
    if byte > _LONG_FORM:
        number = previous + (byte >> 4)
    elif kind == _STOP:
        return _STOP, previous, position
    else:
        number, position = _varint(source, position)
        number = (number >> 1) ^ -(number & 1)
    if not -_MAX_NUMBER - 1 <= number <= _MAX_NUMBER:
        raise _Malformed("the footer has a field of an impossible number")
    if not _TRUE <= kind <= _UUID:
        raise _Malformed(f"the footer has a field of the unknown type {kind}")
    return kind, number, position


def _header(kind: int, number: int, previous: int) -> bytes:
    """The header of a field, or the end of a structure."""
    if kind == _STOP:
        return b"\0"
    step = number - previous
    if 0 < step <= 15:
        return bytes((step << 4 | kind,))
    # Never below zero: it is the row count, a field behind it, or one behind a pointer.
    return bytes((kind,)) + _varint_of(number << 1)


def _elements(source: bytes, position: int) -> tuple[int, int, int]:
    """How many elements a list or set has, their type, and where they begin."""
    byte = source[position]
    position += 1
    kind, count = byte & 0x0F, byte >> 4
    if count == 15:
        count, position = _varint(source, position)
    # There is no element without a byte, so no count can ask for much.
    if count > len(source) - position:
        raise _Malformed(f"the footer has a list of {count} elements, more than it has bytes")
    return count, kind, position


def _structures(source: bytes, position: int, kind: int, what: str) -> tuple[int, int]:
    """How many structures a list has, and where they begin."""
    if kind == _LIST:
        count, element, position = _elements(source, position)
        if count == 0 or element == _STRUCT:
            return count, position
    raise _Malformed(f"the footer's {what} are not a list of structures")


def _skip(source: bytes, position: int, kind: int) -> int:
    """Where a field's value ends."""
    size = len(source)
    usual = _usual_fields()
    # What is open around the value: how many elements are left, and the types of the next and
    # of the one after it, which differ in a map. A structure has -1 left: it says when it ends.
    around: list[list[int]] = []
    while True:
        if kind in _VARINTS:
            position = _skip_varints(source, position, 1)
        elif kind == _BINARY:
            length, position = _varint(source, position)
            position += length
        elif kind == _STRUCT:
            match = usual(source, position)
            assert match is not None
            position = match.end()
            if match.lastindex is None:
                around.append([-1, 0, 0])
        elif kind in (_LIST, _SET):
            count, element, position = _elements(source, position)
            if element in _ELEMENT_WIDTHS:
                position += count * _ELEMENT_WIDTHS[element]
            elif element in _VARINTS:
                position = _skip_varints(source, position, count)
            elif count:
                around.append([count, element, element])
        elif kind == _MAP:
            count, position = _varint(source, position)
            if count:
                kinds = source[position]
                position += 1
                if 2 * count > size - position:
                    raise _Malformed(f"the footer has a map of {count} entries, more than it has bytes")
                around.append([2 * count, _as_element(kinds >> 4), _as_element(kinds & 0x0F)])
        elif kind in _WIDTHS:
            position += _WIDTHS[kind]
        else:
            raise _Malformed(f"the footer has a value of the unknown type {kind}")
        if position > size:
            raise _Malformed(_TOO_EARLY)
        if len(around) > _MAX_DEPTH:
            raise _Malformed(f"the footer is nested more than {_MAX_DEPTH} deep")
        while around:
            inner = around[-1]
            left = inner[0]
            if left < 0:
                match = usual(source, position)
                assert match is not None
                position = match.end()
                if match.lastindex is None:
                    kind, _, position = _field(source, position, 0)
                    break
            elif left > 0:
                _, kind, after = inner
                inner[:] = left - 1, after, kind
                break
            around.pop()
        else:
            return position


def _as_element(kind: int) -> int:
    return _BYTE if kind in (_TRUE, _FALSE) else kind


def _skip_varints(source: bytes, position: int, count: int) -> int:
    for at_once, pattern in _VARINT_RUNS:
        while count >= at_once:
            match = pattern(source, position)
            if match is None:
                if at_once > 1:
                    break
                raise _Malformed(_TOO_EARLY if len(source) - position < _MAX_VARINT else _TOO_LONG)
            position = match.end()
            count -= at_once
    return position


# --- the usual shapes, as regular expressions ---------------------------------------

# The language is one of prefixes: the first byte of whatever comes next says which branch it is.
# So a match that fails does so at once, there is no second way to try. What is longer, larger or
# deeper than these know is walked through.
_Match = Callable[[bytes, int], re.Match[bytes] | None]

_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_VARINT_RUNS: tuple[tuple[int, _Match], ...] = tuple(
    (count, re.compile(rb"(?:%b){%d}" % (_VARINT, count)).match) for count in (1024, 32, 1)
)
_USUAL_BINARY = 64
_USUAL_FIELDS = 64


def _one_of(*bytes_: int) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % byte for byte in bytes_) + b"]"


def _either(*branches: bytes) -> bytes:
    return b"(?:" + b"|".join(branches) + b")"


def _next_field(*kinds: int) -> bytes:
    """The short header of a field of one of these types, whatever its number."""
    return _one_of(*(step << 4 | kind for step in range(1, 16) for kind in kinds))


def _list_of(element: bytes, most: int, kind: int) -> list[bytes]:
    """A list of each length from one, with its header."""
    return [b"\\x%02x(?:%b){%d}" % (count << 4 | kind, element, count) for count in range(1, most + 1)]


_TEXT = _either(*(b"\\x%02x.{%d}" % (length, length) for length in range(_USUAL_BINARY)))
_PLAIN_FIELDS = (
    _next_field(*_VARINTS) + _VARINT,
    _next_field(_BINARY) + _TEXT,
    _next_field(_TRUE, _FALSE),
    _next_field(_BYTE) + b".",
    _next_field(_DOUBLE) + b".{8}",
)
_PLAIN_LISTS = (
    rb"[\x00-\x0f]",
    # Written out, for a repetition of more than one character is dear.
    *(_one_of(*(count << 4 | kind for kind in _VARINTS)) + _VARINT * count for count in range(1, 15)),
)


@cache
def _fields() -> bytes:
    """The fields of a structure such as ColumnMetaData: plain values, lists, and structures of such."""
    inner = _some_of(*_PLAIN_FIELDS, _next_field(_LIST) + _either(*_PLAIN_LISTS)) + rb"\x00"
    lists = (*_PLAIN_LISTS, *_list_of(_TEXT, 6, _BINARY), *_list_of(inner, 4, _STRUCT))
    return _some_of(*_PLAIN_FIELDS, _next_field(_LIST) + _either(*lists), _next_field(_STRUCT) + inner)


def _some_of(*fields: bytes) -> bytes:
    return _either(*fields) + b"{0,%d}" % _USUAL_FIELDS


# These two take a moment to compile, which is spent when the first footer is rewritten.
@cache
def _usual_fields() -> _Match:
    """Fields up to one that is not usual, or up to the structure's end, which is its group."""
    return re.compile(_fields() + rb"(\x00)?", re.DOTALL).match


@cache
def _usual_chunk() -> _Match:
    """A ColumnChunk as writers make it: path and offset, metadata, pointers (its group), and the end."""
    i64, i32 = rb"\x16" + _VARINT, rb"\x15" + _VARINT
    place = _either(rb"\x26" + _VARINT, rb"\x18" + _TEXT + i64)
    pointers = _either(i64 + i32 + _either(i64 + i32) + b"?", rb"\x36" + _VARINT + i32) + b"?"
    return re.compile(place + rb"\x1c" + _fields() + rb"\x00(" + pointers + rb")\x00", re.DOTALL).match
