"""A second reading of Thrift's compact protocol, to make and to judge footers with.

It shares nothing with the code under test: it decodes a structure to a tree, as plainly as
the protocol's specification tells it, and encodes a tree again. Numbers stay the bytes they
were, so that what is decoded and encoded comes out the same, in whichever form it was written.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BOOLEANS, BYTE, NUMBERS, DOUBLE, BINARY, LISTS, MAP, STRUCT, UUID = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 11, 12, 13
I32, I64, LIST = 5, 6, 9


class NotCompact(Exception):
    """The bytes are not a structure in the compact protocol."""


@dataclass(slots=True)
class Field:
    """A field of a structure. `long` is its number as the long form has it, else the form is short."""

    number: int
    kind: int
    value: Any
    long: bytes | None = None


@dataclass(slots=True)
class Struct:
    fields: list[Field] = field(default_factory=list)

    def all(self, number: int) -> list[Any]:
        return [each.value for each in self.fields if each.number == number]

    def one(self, number: int) -> Any:
        (value,) = self.all(number)
        return value

    def without(self, *numbers: int) -> Struct:
        return Struct([each for each in self.fields if each.number not in numbers])


@dataclass(slots=True)
class List:
    """A list or a set. `size` is its size as the long form has it."""

    kind: int
    values: list[Any]
    size: bytes | None = None


@dataclass(slots=True)
class Map:
    size: bytes
    kinds: int
    values: list[Any]


def number_of(raw: bytes) -> int:
    """A varint's bytes as an unsigned number."""
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(raw))


def signed_number_of(raw: bytes) -> int:
    value = number_of(raw)
    return -(value + 1) // 2 if value % 2 else value // 2


def varint(value: int) -> bytes:
    low, high = value % 128, value // 128
    return bytes([low]) if high == 0 else bytes([128 + low]) + varint(high)


def signed_varint(value: int) -> bytes:
    return varint(2 * value if value >= 0 else -2 * value - 1)


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise NotCompact("too short")
        self.at += count
        return found

    def varint(self) -> bytes:
        for length, byte in enumerate(self.data[self.at : self.at + 10], start=1):
            if byte < 128:
                return self.take(length)
        raise NotCompact("number too long, or too short")

    def size_of(self, raw: bytes) -> int:
        size = number_of(raw)
        if size > len(self.data) - self.at:
            raise NotCompact("size too large")
        return size

    def struct(self) -> Struct:
        found = Struct()
        number = 0
        while header := self.take(1)[0]:
            step, kind = divmod(header, 16)
            long = None
            if step:
                number += step
            else:
                long = self.varint()
                number = signed_number_of(long)
            if not -32768 <= number <= 32767:
                raise NotCompact("field number too large")
            value = None if kind in BOOLEANS else self.value(kind)
            found.fields.append(Field(number, kind, value, long))
        return found

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.varint()
        if kind in (BYTE, *BOOLEANS):
            return self.take(1)
        if kind == DOUBLE:
            return self.take(8)
        if kind == UUID:
            return self.take(16)
        if kind == BINARY:
            size = self.varint()
            return size, self.take(self.size_of(size))
        if kind in LISTS:
            count, element = divmod(self.take(1)[0], 16)
            raw = self.varint() if count == 15 else None
            count = self.size_of(raw) if raw is not None else count
            return List(element, [self.value(element) for _ in range(count)], raw)
        if kind == MAP:
            raw = self.varint()
            count = self.size_of(raw)
            kinds = self.take(1)[0] if count else 0
            return Map(raw, kinds, [self.value(each) for _ in range(count) for each in divmod(kinds, 16)])
        if kind == STRUCT:
            return self.struct()
        raise NotCompact("unknown type")


def decode(data: bytes) -> Struct:
    """The tree of a structure, which has to end where the bytes end."""
    decoder = _Decoder(data)
    try:
        found = decoder.struct()
    except RecursionError:
        raise NotCompact("too deep") from None
    if decoder.at != len(data):
        raise NotCompact("too long")
    return found


def encode(value: Any, kind: int = STRUCT) -> bytes:
    """The bytes of a tree."""
    if isinstance(value, Struct):
        out, number = [], 0
        for each in value.fields:
            step = each.number - number
            if each.long is not None:
                out.append(bytes([each.kind]) + each.long)
            elif 1 <= step <= 15:
                out.append(bytes([16 * step + each.kind]))
            else:
                out.append(bytes([each.kind]) + signed_varint(each.number))
            out.append(b"" if each.value is None else encode(each.value, each.kind))
            number = each.number
        return b"".join(out) + b"\0"
    if isinstance(value, List):
        raw = value.size
        if raw is None and len(value.values) > 14:
            raw = varint(len(value.values))
        head = bytes([16 * len(value.values) + value.kind]) if raw is None else bytes([0xF0 + value.kind]) + raw
        return head + b"".join(encode(each, value.kind) for each in value.values)
    if isinstance(value, Map):
        kinds = divmod(value.kinds, 16)
        inner = b"".join(encode(each, kinds[place % 2]) for place, each in enumerate(value.values))
        return value.size + (bytes([value.kinds]) if value.values else b"") + inner
    if kind == BINARY:
        return b"".join(value)
    assert isinstance(value, bytes)
    return value


# --- footers ---------------------------------------------------------------------


def split(file: bytes) -> tuple[bytes, bytes]:
    """A Parquet file's bytes before its footer, and the footer."""
    length = int.from_bytes(file[-8:-4], "little")
    return file[: -8 - length], file[-8 - length : -8]


def join(data: bytes, footer: bytes) -> bytes:
    """A Parquet file of its two parts."""
    return data + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def parquet(table: pa.Table, **options: Any) -> bytes:
    """A table as a Parquet file, with column and offset indexes."""
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"write_page_index": True, **options})
    return sink.getvalue()


def footer_of(table: pa.Table, **options: Any) -> bytes:
    return split(parquet(table, **options))[1]


def _structs_of(parent: Struct, number: int) -> list[Struct]:
    found = [each for each in parent.fields if each.number == number]
    if any(each.kind != LIST or (each.value.values and each.value.kind != STRUCT) for each in found):
        raise NotCompact("not a list of structures")
    return [value for each in found for value in each.value.values]


def chunks_of(tree: Struct) -> list[Struct]:
    """The column chunks of all row groups."""
    return [chunk for group in _structs_of(tree, 4) for chunk in _structs_of(group, 1)]


def take_pointers_out(tree: Struct) -> None:
    for chunk in chunks_of(tree):
        chunk.fields = chunk.without(4, 5, 6, 7).fields


def as_version_1(footer: bytes) -> bytes:
    """A footer as the older writers left it: without its row count."""
    return encode(decode(footer).without(3))


def as_version_2(footer: bytes, num_rows: int | None) -> bytes:
    """What an upgrade has to make of a footer; without a row count, only the pointers go.

    It refuses what no reader could take for a footer, or what states another row count.
    """
    tree = decode(footer)
    for each in tree.fields:
        if each.number == 3 and (each.kind != I64 or number_of(each.value) % 2 or number_of(each.value) >= 2**64):
            raise NotCompact("not a row count")
    if num_rows is not None and any(signed_number_of(value) != num_rows for value in tree.all(3)):
        raise NotCompact("another row count")
    take_pointers_out(tree)
    if num_rows is not None and not tree.all(3):
        place = next((place for place, each in enumerate(tree.fields) if each.number > 3), len(tree.fields))
        tree.fields.insert(place, Field(3, I64, signed_varint(num_rows)))
    return encode(tree)


def grown(footer: bytes, size: int) -> tuple[bytes, int]:
    """A footer whose first row group comes again and again, up to a size, and how often it does."""
    tree = decode(footer)
    group = encode(tree.one(4).values[0])
    tree.one(4).values = []
    count = max(1, -((len(encode(tree)) - size) // len(group)))
    # Bytes are encoded as they are.
    tree.one(4).values = [group] * count
    return encode(tree), count
