"""Which partition a record goes to: by its key, as Kafka's producers decide it, or whichever is in use just now."""

from __future__ import annotations

import random
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from lakebook.errors import InvalidInput
from lakebook.names import shown

#: By the hash of the key; records without one go wherever records are gathered.
KEY = "key"
#: Wherever records are gathered, whatever their keys.
STICKY = "sticky"

_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995
_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF
# Below this, hashing keys one by one is faster than to prepare them for hashing together.
_FEW = 256
_KEYS_KEPT = 65_536


def check_partitioner(name: object) -> str:
    """Return `name` if there is such a way to choose a partition."""
    if isinstance(name, str) and name in (KEY, STICKY):
        return name
    raise InvalidInput(f"there is no partitioner {shown(name)}", on="producer", remedy=f"Use {KEY!r} or {STICKY!r}")


def murmur2(data: bytes) -> int:
    """The hash of a key, signed as in Java: the same as Kafka's own."""
    length = len(data)
    found = _SEED ^ length
    whole = length & ~3
    for position in range(0, whole, 4):
        word = int.from_bytes(data[position : position + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        found = (found * _FACTOR & _MASK) ^ word
    if whole < length:
        found = (found ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    found = (found ^ found >> 13) * _FACTOR & _MASK
    found ^= found >> 15
    return found - 2**32 if found > _POSITIVE else found


@lru_cache(_KEYS_KEPT)
def _positive_hash(key: bytes) -> int:
    return murmur2(key) & _POSITIVE


def partition_of_key(key: bytes, partitions: int) -> int:
    """The partition of a key in a topic of so many."""
    return _positive_hash(key) % partitions


def partitions_of_keys(keys: pa.Array, partitions: int) -> pa.Array:
    """The partition of each of many keys (binary); none where there is no key."""
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    known = keys.dictionary_encode()
    return _partitions_of(known.dictionary, partitions).take(known.indices)


def _partitions_of(keys: pa.Array, partitions: int) -> pa.Array:
    if len(keys) <= _FEW:
        return pa.array([partition_of_key(key, partitions) for key in keys.to_pylist()], pa.int32())
    lengths = pc.binary_length(keys)
    hashes, places = [], []
    for length in pc.unique(lengths).to_pylist():
        # Keys of one length have their words at the same places.
        here = pc.indices_nonzero(pc.equal(lengths, length))
        places.append(here)
        hashes.append(_hashes(keys.take(here), length))
    positive = pc.bit_wise_and(pa.chunked_array(hashes), _number(_POSITIVE))
    order = pc.sort_indices(pa.chunked_array(places))
    whole = pc.cast(positive, pa.int64()).take(order)
    quotient = pc.multiply(pc.divide(whole, partitions), partitions)
    return pc.cast(pc.subtract(whole, quotient), pa.int32()).combine_chunks()


def _hashes(keys: pa.Array, length: int) -> pa.Array:
    """The hashes of keys that all have this length, unsigned."""
    found = pa.repeat(_number(_SEED ^ length), len(keys))
    words = -(-length // 4)
    if words:
        # With zeros at the end, what is left over is a word too.
        padded = pc.binary_join_element_wise(keys, b"\0" * (4 * words - length), b"")
        start, count = padded.offset, len(padded)
        first = padded.buffers()[1]
        begin = pa.Array.from_buffers(pa.int32(), 1, [None, first], offset=start)[0].as_py()
        data = padded.buffers()[2].slice(begin, count * words * 4)
        flat = pa.Array.from_buffers(pa.uint32(), count * words, [None, data])
        rows = pa.FixedSizeListArray.from_arrays(flat, words)
    for place in range(words):
        word = pc.list_element(rows, place)
        if place < length // 4:
            word = pc.multiply(word, _number(_FACTOR))
            word = pc.multiply(_shifted(word, 24), _number(_FACTOR))
            found = pc.bit_wise_xor(pc.multiply(found, _number(_FACTOR)), word)
        else:
            found = pc.multiply(pc.bit_wise_xor(found, word), _number(_FACTOR))
    return _shifted(pc.multiply(_shifted(found, 13), _number(_FACTOR)), 15)


def _number(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.uint32())


def _shifted(values: pa.Array, bits: int) -> pa.Array:
    return pc.bit_wise_xor(values, pc.shift_right(values, _number(bits)))


def another_partition(partitions: int, former: int | None) -> int:
    """A partition to gather records in, if possible another than the last time."""
    if former is None or partitions == 1 or former >= partitions:
        return random.randrange(partitions)  # noqa: S311 - no secret
    return (former + random.randrange(1, partitions)) % partitions  # noqa: S311 - no secret
