"""What Spark needs for a warehouse in a bucket: Hadoop's S3A, told where the bucket is and with what it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lakebook.errors import SparkUnsuitable
from lakebook.storage.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SDK = "2.29.52"
#: S3A, and of AWS's SDK only the parts that it uses: the bundle that it asks for is thirty times as large.
PACKAGES = (
    "org.apache.hadoop:hadoop-aws:3.4.2",
    f"software.amazon.awssdk:s3:{_SDK}",
    f"software.amazon.awssdk:s3-transfer-manager:{_SDK}",
    f"software.amazon.awssdk:sts:{_SDK}",
)
EXCLUDED = "software.amazon.awssdk:bundle"

_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_GIVEN = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_GIVEN_FOR_A_WHILE = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_AS_AWS_FINDS_THEM = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"


def with_packages(settings: Mapping[str, str]) -> dict[str, str]:
    """Spark's settings with what it takes to open buckets."""
    return joined(joined(settings, "spark.jars.packages", *PACKAGES), "spark.jars.excludes", EXCLUDED)


def joined(settings: Mapping[str, str], name: str, *needed: str) -> dict[str, str]:
    """Settings of which one is a list that holds what is needed; what somebody asked for stays."""
    named = [item for item in settings.get(name, "").split(",") if item]
    return {**settings, name: ",".join([*named, *(item for item in needed if item not in named)])}


def reach(spark: SparkSession, warehouse: Warehouse) -> None:
    """Let a session open the bucket of a warehouse, and no other by what is set here.

    It is said to Hadoop alone, in the process of the driver, from where it goes to the executors with each job. So
    no secret is among Spark's own settings, which its pages and logs show. A client of Spark Connect cannot say it:
    there the server has to know its bucket.
    """
    jvm: Any = getattr(spark, "_jvm", None)
    if warehouse.bucket is None or jvm is None:
        return
    if not jvm.org.apache.spark.util.Utils.classIsLoadable(_S3A):
        raise SparkUnsuitable(
            "Hadoop's S3A is not on its class path",
            on="Spark",
            remedy=f"Use book.spark(), or start Spark with spark.jars.packages={','.join(PACKAGES)}"
            f" and spark.jars.excludes={EXCLUDED}",
        )
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    for name, value in _settings(warehouse, warehouse.bucket).items():
        if hadoop.get(name) != value:
            hadoop.set(name, value)


def _settings(warehouse: Warehouse, bucket: str) -> dict[str, str]:
    access = warehouse.access.resolved()
    told = {"path.style.access": str(access.path_style == "yes").lower()}
    if access.endpoint:
        told["endpoint"] = access.endpoint
    if access.region or access.endpoint:
        told["endpoint.region"] = access.with_region(None).region
    if access.has_credentials:
        told |= {"access.key": access.access_key_id, "secret.key": access.secret_access_key}
        told["aws.credentials.provider"] = _GIVEN_FOR_A_WHILE if access.session_token else _GIVEN
        if access.session_token:
            told["session.token"] = access.session_token
    else:
        told["aws.credentials.provider"] = _AS_AWS_FINDS_THEM
    own = {f"fs.s3a.bucket.{bucket}.{name}": value for name, value in told.items()}
    # Locations are `s3://` for every engine; Hadoop knows the scheme by another name.
    return {"fs.s3.impl": _S3A, "fs.AbstractFileSystem.s3.impl": "org.apache.hadoop.fs.s3a.S3A", **own}
