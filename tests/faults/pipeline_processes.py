"""A program that runs a pipeline until it is done, or killed. It tells of every batch on its standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# It is run by its path, and the programs that it needs lie beside it.
sys.path.insert(0, str(Path(__file__).parents[1]))

import lakebook
from lakebook.errors import LakebookError
from lakebook.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Where a process comes by that runs a pipeline.
POINTS = ("pipeline.planned", "pipeline.written", "pipeline.landed")
PIPELINE, TOPIC, TABLE = "p", "orders", "t"
#: For tests that kill: nobody waits long for the dead.
IMPATIENT: dict[str, Any] = {"lease_seconds": 0.5, "insert_alive": 1.0, "lock_timeout": 2.0}


def through_python(frame: DataFrame) -> DataFrame:
    """The same rows, by way of workers of Python that can be killed."""

    def same(batches: Iterable[Any]) -> Iterable[Any]:
        yield from batches

    return frame.mapInArrow(same, frame.schema)


def tell(**fact: Any) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def main(target: str, settings: str) -> None:
    """Run the pipeline again and again until nothing is left to do; what fails is tried again."""
    from spark.sessions import QUICK

    spark = spark_session(master="local[2,8]", **QUICK)
    tell(started=True)
    with lakebook.open(target, **json.loads(settings), **IMPATIENT) as book:
        pipeline = book.pipelines[PIPELINE]
        while True:
            try:
                if not pipeline.waits():
                    break
                pipeline.run(spark, progress=lambda done, total, step: tell(done=done, total=total))
            except LakebookError as error:
                tell(error=str(error))
        tell(finished=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
