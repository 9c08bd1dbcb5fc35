"""A program whose Spark writes to buckets with credentials that it finds as AWS's own tools do.

The store is reached through somebody who writes down how each request came. It tells as JSON who signed what Python and
what Spark asked for, and in which host the bucket stood.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

import lakebook
from fault_proxy import FaultProxy, Head
from lakebook.errors import LakebookError
from spark.sessions import QUICK

#: The name of a store that is found through a proxy of HTTP alone.
STORE = "store.test"
SETTINGS: dict[str, Any] = {"publish": "off", "s3_retry_seconds": 1.0}
Told = dict[str, Any]


def by_path(folder: Path, bucket: str, proxy: FaultProxy, spark: SparkSession) -> Told:
    """Write and read; who has signed what came, and how many have."""
    with lakebook.open(
        folder / "path", warehouse=f"s3://{bucket}/lake", s3_endpoint=proxy.endpoint, **SETTINGS
    ) as book:
        table = book.tables.create("t", "id BIGINT")
        try:
            table.insert(spark.range(3))
        except LakebookError as error:
            return {"failed": [type(error).__name__, str(error)]}
        rows = table.read(spark).count()
        in_pyiceberg = 0
        if table.publish():
            in_pyiceberg = book.catalog().load_table(("default", "t")).scan().to_arrow().num_rows
    signers = {(speaker(head), *head.signer) for head in proxy.heads}
    return {"rows": [rows, in_pyiceberg], "signers": sorted(signers)}


def by_host(folder: Path, bucket: str, proxy: FaultProxy, spark: SparkSession) -> Told:
    """Write where the bucket's name stands before the store's; the hosts that were asked."""
    # Spark was told where the proxy is when it was started.
    os.environ |= {"http_proxy": proxy.endpoint, "HTTP_PROXY": proxy.endpoint}
    proxy.heads.clear()
    place: Told = {"warehouse": f"s3://{bucket}/lake", "s3_endpoint": f"http://{STORE}", "s3_path_style": "no"}
    with lakebook.open(folder / "host", **place, **SETTINGS) as book:
        rows = book.tables.create("t", "id BIGINT").insert(spark.range(3)).rows
    return {"hosted": rows, "hosts": sorted({(speaker(head), head.host) for head in proxy.heads})}


def speaker(head: Head) -> str:
    agent = head.headers["user-agent"].lower()
    return "spark" if "hadoop" in agent else agent.partition("/")[0]


def main(folder: Path, endpoint: str, first: str, second: str, late: str) -> None:
    with closing(FaultProxy(endpoint, STORE)) as proxy:
        through = f"spark.hadoop.fs.s3a.bucket.{second}.proxy"
        address = urlsplit(proxy.endpoint)
        quick: Told = {**QUICK, f"{through}.host": address.hostname, f"{through}.port": str(address.port)}
        os.environ["LAKEBOOK_WAREHOUSE"] = f"s3://{first}/lake"
        spark = lakebook.spark_session(master="local[1]", **quick)
        del os.environ["LAKEBOOK_WAREHOUSE"]
        # What Python is told from now on, Spark's own process does not know.
        os.environ |= json.loads(late)
        found = by_path(folder, first, proxy, spark)
        if "failed" not in found:
            found |= by_host(folder, second, proxy, spark)
        spark.stop()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
