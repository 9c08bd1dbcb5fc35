"""A store that is spoken to as S3 is, on loopback, and buckets in it."""

from __future__ import annotations

import uuid
from typing import Any

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

KEY, SECRET, REGION = "lakebook-key", "lakebook-s3cret", "us-east-1"


class Buckets:
    """A server with nothing in it, and new buckets."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        #: What reaches it, as a book's settings say it.
        self.settings: dict[str, Any] = {
            "s3_endpoint": self.endpoint,
            "s3_region": REGION,
            "s3_access_key_id": KEY,
            "s3_secret_access_key": SECRET,
        }
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=Config(s3={"addressing_style": "path"}),
        )

    def new_bucket(self) -> str:
        name = f"lake-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """All that is in a bucket, also what is there for nobody's use."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def uploads(self, bucket: str) -> list[str]:
        """Uploads in parts that were begun and not ended."""
        return [found["Key"] for found in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]

    def stop(self) -> None:
        self.client.close()
        self._server.stop()
