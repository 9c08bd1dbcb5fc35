"""A session of Spark Connect can do what one of the usual kind can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_topics_tables_pipelines_and_views_work_through_spark_connect(tmp_path: Path) -> None:
    # A session of its own, in a process of its own: the other tests have one of the usual kind.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "LAKEBOOK_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(HERE / "connect_client.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["session"].startswith("pyspark.sql.connect")
    assert found == {
        "session": found["session"],
        "source": 6,
        "native": 4,
        "copies": 7,
        "inserted": 3,
        "table": [0, 1, 2],
        "by_source": 3,
        "pipeline": [3, 2, 1],
        "backfill": [1, 1, True],
        "by_sql": [2, 4],
        "avro": [2, 1, 1],
        "refused": "InvalidPipeline",
        "view": 3,
        "sql": [3, 3, 6],
        "catalog": ["SparkUnsuitable", found["catalog"][1]],
        "sound": True,
    }
    assert "usual kind" in found["catalog"][1]
