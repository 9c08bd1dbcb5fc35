"""What Spark needs for a warehouse in a bucket: Hadoop's S3A, told where the bucket is and with what it is opened."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lakebook.errors import SparkUnsuitable
from lakebook.storage.access import S3Access
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

#: The catalog by which Iceberg's source opens what is named by its place.
_OF_FOLDERS = "default_iceberg"
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
# What Hadoop says of a scheme that it has no class for, and of a class that is not there.
_LACKS_S3A = re.compile(r'No FileSystem for scheme "s3"|fs\.s3a\.S3AFileSystem not found|UNSUPPORTED_FILESYSTEM')
#: What a client of Spark Connect has on it whose server was asked whether it opens buckets.
_KNOWN = "_lakebook_opens_buckets"
_GIVEN = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_GIVEN_FOR_A_WHILE = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_AS_AWS_FINDS_THEM = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
# It takes less for a mistake, and says so in the log.
_S3A_LEAST_SECONDS = 15.0
_S3A_RETRIES = 4
# The first pause is twice the interval, and each is twice the one before.
_S3A_INTERVALS = sum(2**number for number in range(1, _S3A_RETRIES + 1))
_S3A_PART = 16 << 20


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
    if warehouse.bucket is None:
        return
    if jvm is None:
        _ask_server(spark, warehouse)
        return
    if not jvm.org.apache.spark.util.Utils.classIsLoadable(_S3A):
        raise SparkUnsuitable(
            "Hadoop's S3A is not on its class path",
            on="Spark",
            remedy=f"Use book.spark(), or start Spark with spark.jars.packages={','.join(PACKAGES)}"
            f" and spark.jars.excludes={EXCLUDED}",
        )
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    access = warehouse.access.resolved()
    limits = {name: value for name, value in _limits(access).items() if not _is_set(hadoop, f"fs.s3a.{name}")}
    own = {f"fs.s3a.bucket.{warehouse.bucket}.{name}": value for name, value in (_address(access) | limits).items()}
    # Locations are `s3://` for every engine; Hadoop knows the scheme by another name.
    told = {"fs.s3.impl": _S3A, "fs.AbstractFileSystem.s3.impl": "org.apache.hadoop.fs.s3a.S3A", **own}
    with unlogged():
        for conf in (hadoop, *_copies(spark)):
            for name, value in told.items():
                if conf.get(name) != value:
                    conf.set(name, value)


def _ask_server(spark: Any, warehouse: Warehouse) -> None:
    """Refuse the server of a client of Spark Connect that opens no `s3://`: it cannot be asked but by a use of it."""
    if getattr(spark, _KNOWN, False):
        return
    nowhere = f"s3://{warehouse.bucket}/lakebook/no/such/folder"
    try:
        spark.read.format("text").load(nowhere).schema  # noqa: B018 - this asks
    except Exception as error:  # noqa: BLE001 - what else is wrong, whoever uses the bucket is told
        if _LACKS_S3A.search(str(error)):
            raise SparkUnsuitable(
                "the server of this client cannot open buckets",
                on="Spark Connect",
                remedy=f"Have the server started with spark.jars.packages={','.join(PACKAGES)},"
                f" spark.jars.excludes={EXCLUDED}, spark.hadoop.fs.s3.impl={_S3A}, and the bucket's address and"
                " credentials as spark.hadoop.fs.s3a.*; or use book.spark()",
            ) from None
    setattr(spark, _KNOWN, True)


def _copies(spark: Any) -> Iterator[Any]:
    """What else Hadoop's settings are taken from: Iceberg opens folders with those of the time when it first did so."""
    catalogs = spark._jsparkSession.sessionState().catalogManager()
    if catalogs.isCatalogRegistered(_OF_FOLDERS):
        catalog = catalogs.catalog(_OF_FOLDERS)
        # Nobody else tells it of a bucket that the session comes to know later.
        tables = catalog.getClass().getDeclaredField("tables")
        tables.setAccessible(True)
        yield tables.get(catalog).getConf()


class _Deaf(logging.Filter):
    """Passes over what one thread says."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextmanager
def unlogged() -> Iterator[None]:
    """Tell the JVM secrets: where somebody debugs, py4j would log each word that goes over and comes back."""
    deaf = _Deaf()
    speakers = [logging.getLogger(name) for name in ("py4j.clientserver", "py4j.java_gateway")]
    for speaker in speakers:
        speaker.addFilter(deaf)
    try:
        yield
    finally:
        for speaker in speakers:
            speaker.removeFilter(deaf)


def _is_set(hadoop: Any, name: str) -> bool:
    """Whether somebody has set it for Spark, and it is not only Hadoop's default: then his word counts."""
    return any(source != "core-default.xml" for source in hadoop.getPropertySources(name) or ())


def _limits(access: S3Access) -> dict[str, str]:
    """How long a request may take, and how often it is tried again.

    S3A counts its attempts and does not look at the clock: its pauses together are as long as a failing request is to
    be tried again. By itself it would wait for days if a store says that it has too much to do, and for a quarter of
    an hour for one part.
    """
    seconds = max(access.request_seconds, _S3A_LEAST_SECONDS)
    limit = str(_S3A_RETRIES if access.retry_seconds else 0)
    interval = _milliseconds(access.retry_seconds / _S3A_INTERVALS)
    return {
        # Until an answer begins, with all attempts that AWS's SDK makes meanwhile; and between two pieces of it.
        "connection.request.timeout": _milliseconds(seconds),
        "connection.timeout": _milliseconds(seconds),
        # A part, or an object as small as one; it has the size of our own.
        "connection.part.upload.timeout": _milliseconds(access.request_seconds),
        "multipart.size": str(_S3A_PART),
        "retry.limit": limit,
        "retry.interval": interval,
        "retry.throttle.limit": limit,
        "retry.throttle.interval": interval,
    }


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _address(access: S3Access) -> dict[str, str]:
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
    return told
