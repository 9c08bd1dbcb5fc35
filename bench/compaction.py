"""Write amplification of compaction: how often a byte is written again until the table has come to rest.

A table is fed one file at a time and compacted on Spark at regular intervals, as a daemon would. Beside it
stands what it would have cost to merge all small files at each of these rounds, which is what a rewrite
without a rule does; that is reckoned from the sizes of the same files.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from time import perf_counter

import pyarrow as pa

from bench.asked import Asked, Say
from bench.places import Ground
from bench.report import Result
from lakebook.lake.table import Table
from lakebook.registry.table_files import visible_files
from lakebook.spark.session import spark_session

_INSERTS, _FEW_INSERTS = 600, 60
_ROUNDS, _FEW_ROUNDS = 30, 6
_ROWS = 2000
_MOST_FILES = 1_000_000


def measure(ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Feed, compact, feed, compact; then count bytes."""
    inserts, rounds = (_FEW_INSERTS, _FEW_ROUNDS) if asked.quick else (_INSERTS, _ROUNDS)
    spark = spark_session(master="local[2]", **{"spark.log.level": "ERROR", "spark.driver.memory": "2g"})
    try:
        with ground.new(inserts, "compaction") as place:
            book = place.open(publish="off", compact_files=5)
            table = book.tables.create("fed", "id BIGINT, value DOUBLE")
            random = Random(1)
            inserted = rewritten = everything = 0
            seconds = 0.0
            for number in range(inserts):
                say("feeding", number, inserts)
                rows = {
                    "id": [random.randrange(10**12) for _ in range(_ROWS)],
                    "value": [random.random() for _ in range(_ROWS)],
                }
                inserted += table.insert_arrow(pa.table(rows)).bytes
                if (number + 1) % (inserts // rounds) == 0:
                    everything += _size(table)
                    begun = perf_counter()
                    rewritten += table.compact(spark).bytes_out
                    seconds += perf_counter() - begun
            files = table.record.file_count
            yield Result(
                "bytes written again per byte, compaction",
                place.kind,
                inserts,
                rewritten / inserted,
                everything / inserted,
                "x",
                at_most=0.7,
            )
            yield Result("files left after compaction", place.kind, inserts, float(files), float(inserts), "files")
            yield Result("compaction", place.kind, inserts, rewritten / seconds / 1e6, None, "MB/s")
    finally:
        spark.stop()


def _size(table: Table) -> int:
    """Bytes in all files, which are all small here."""
    record = table.record
    lake = table._lake
    files = lake.registry.read_with(lambda reader: visible_files(reader, record.id, record.version, 0, _MOST_FILES))
    return sum(file.file_size for file in files)
