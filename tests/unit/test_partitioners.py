"""Keys land in the partitions where Kafka's producers put them."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from lakebook.errors import InvalidInput
from lakebook.streams.partitioners import (
    another_partition,
    check_partitioner,
    murmur2,
    partition_of_key,
    partitions_of_keys,
)

#: From the tests of Kafka's own client.
KNOWN = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", KNOWN)
def test_the_hash_is_that_of_kafka(key: bytes) -> None:
    assert murmur2(key) == KNOWN[key]
    for partitions in (1, 3, 12, 1000):
        assert partition_of_key(key, partitions) == (KNOWN[key] & 0x7FFFFFFF) % partitions


@pytest.mark.parametrize("count", [5, 5_000])
def test_keys_hashed_together_land_where_each_of_them_does(count: int) -> None:
    chance = random.Random(count)
    keys: list[bytes | None] = [chance.randbytes(chance.randrange(0, 23)) for _ in range(count)]
    keys += [*KNOWN, b"", None, keys[0]]
    chance.shuffle(keys)
    for array in (pa.array(keys, pa.binary()), pa.array([b"x", *keys], pa.binary()).slice(1)):
        expected = [None if key is None else partition_of_key(key, 7) for key in keys]
        assert partitions_of_keys(array, 7).to_pylist() == expected
    halves = pa.chunked_array([keys[:2], keys[2:]], pa.binary())
    assert partitions_of_keys(halves, 7).to_pylist() == expected


def test_no_keys_are_no_trouble() -> None:
    assert partitions_of_keys(pa.array([], pa.binary()), 3).to_pylist() == []
    assert partitions_of_keys(pa.nulls(3, pa.binary()), 3).to_pylist() == [None] * 3


def test_another_partition_is_another_one_where_there_is_one() -> None:
    assert another_partition(1, 0) == 0
    assert {another_partition(3, 1) for _ in range(200)} == {0, 2}
    assert {another_partition(3, None) for _ in range(200)} == {0, 1, 2}
    assert another_partition(2, 5) in (0, 1)


def test_a_partitioner_that_does_not_exist_is_refused() -> None:
    assert check_partitioner("sticky") == "sticky"
    with pytest.raises(InvalidInput, match="'key' or 'sticky'"):
        check_partitioner("round-robin")
