"""A store that is spoken to as S3 is, on loopback, and buckets in it."""

from __future__ import annotations

import uuid
from typing import Any

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

#: Where a warehouse may be.
FOLDER, BUCKET = "folder", "bucket"

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
        self.client: Any = _client(self.endpoint)

    def new_bucket(self) -> str:
        name = f"lake-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """All that is in a bucket, also what is there for nobody's use."""
        return list(self.marks(bucket, prefix))

    def marks(self, bucket: str, prefix: str = "") -> dict[str, str]:
        """All that is in a bucket, and what the store knows its bytes by."""
        return _marks(self.client, bucket, prefix)

    def read(self, bucket: str, key: str) -> bytes:
        """The bytes of an object."""
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def uploads(self, bucket: str) -> list[str]:
        """Uploads in parts that were begun and not ended."""
        return _uploads(self.client, bucket)

    def stop(self) -> None:
        self.client.close()
        self._server.stop()


def left_in(warehouse: str, endpoint: str) -> tuple[set[str], list[str]]:
    """The paths of all objects in a warehouse, and of all uploads that were begun there and not ended."""
    _, _, bucket, prefix = warehouse.split("/", 3)
    client = _client(endpoint)
    try:
        objects, uploads = _marks(client, bucket, f"{prefix}/"), _uploads(client, bucket)
    finally:
        client.close()
    return {key.removeprefix(f"{prefix}/") for key in objects}, [key.removeprefix(f"{prefix}/") for key in uploads]


def _client(endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}),
    )


def _marks(client: Any, bucket: str, prefix: str) -> dict[str, str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {found["Key"]: found["ETag"] for page in pages for found in page.get("Contents", ())}


def _uploads(client: Any, bucket: str) -> list[str]:
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket)
    return [found["Key"] for page in pages for found in page.get("Uploads", ())]
