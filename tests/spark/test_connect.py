"""A session of Spark Connect can do what one of the usual kind can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buckets import BUCKET, FOLDER, Buckets
from extent import EVERYWHERE, long

HERE = Path(__file__).parent


@pytest.mark.parametrize("warehouse", [FOLDER, BUCKET])
@long(FOLDER)
def test_topics_tables_pipelines_and_views_work_through_spark_connect(
    tmp_path: Path, buckets: Buckets, warehouse: str
) -> None:
    # A session of its own, in a process of its own: the other tests have one of the usual kind.
    gone = {name for name in os.environ if name.startswith(("SPARK_", "LAKEBOOK_"))} - {"SPARK_SUBMIT_OPTS"}
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    extent = "all" if EVERYWHERE else "much"
    bucket = {**buckets.settings, "warehouse": f"s3://{buckets.new_bucket()}/lake"}
    done = subprocess.run(
        [sys.executable, str(HERE / "connect_client.py"), str(tmp_path), json.dumps(bucket), warehouse, extent],
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["session"].startswith("pyspark.sql.connect")
    if warehouse == FOLDER:
        bare = found.pop("bucket")
        assert bare.pop("rows") == [2, 2]
        # A server that opens no buckets is said to be one, with what its operator has to do.
        assert {name: told[0] for name, told in bare.items()} == dict.fromkeys(bare, "SparkUnsuitable")
        assert all("spark.hadoop.fs.s3.impl" in told[1] for told in bare.values())
    more = {"copies": 7, "avro": [2, 1, 1], "view": 3, "sql": [3, 3, 6]}
    assert found == {
        "session": found["session"],
        "source": 6,
        "native": 4,
        "inserted": 3,
        "table": [0, 1, 2],
        "by_source": 3,
        "pipeline": [3, 2, 1],
        "backfill": [1, 1, True],
        "by_sql": [2, 4],
        "refused": "InvalidPipeline",
        "catalog": ["SparkUnsuitable", found["catalog"][1]],
        "sound": True,
        **(more if EVERYWHERE else {}),
    }
    assert "usual kind" in found["catalog"][1]
