"""Spark sessions that can read and write Lakebook's tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lakebook.errors import SparkUnsuitable
from lakebook.spark import buckets
from lakebook.storage.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Iceberg's runtime for the Spark that Lakebook is made for.
ICEBERG_RUNTIME = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.ansi.enabled": "true",
    # For what Spark's own SQL has no words for: branches, tags, partition fields. It can be set only at the start.
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
}
#: The master, unless another is named.
_HERE = "local[*]"
_CATALOG = "org.apache.iceberg.spark.SparkCatalog"
_PYTHON_ERROR = re.compile(r"[A-Za-z_][\w.]*: ")
# What an address may carry that is nobody's business: a password, or a token among its parameters.
_SECRETS = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?<=[?&])[^\s&)\]]+=[^\s&)\]]*")
_ICEBERG_SOURCE = "org.apache.iceberg.spark.source.IcebergSource"


def spark_session(app: str = "lakebook", *, master: str | None = None, **settings: str) -> SparkSession:
    """A Spark session with Iceberg's runtime, in UTC; `settings` are Spark's own, with `_` for `.`.

    The master is what `LAKEBOOK_SPARK_MASTER` says, or all cores of this machine, unless it is given. It can open a
    bucket if `LAKEBOOK_WAREHOUSE` names one; `book.spark()` knows whether its book needs that. An active session is
    used as it is. Names with other characters can be given as `**{"spark.sql.shuffle.partitions": "8"}`. On a
    cluster, Lakebook's own modules are sent to the executors.
    """
    from pyspark.sql import SparkSession

    from lakebook.spark.shipping import ship

    # Workers have to be of this Python, whatever a shell would find first.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app).master(master or os.environ.get("LAKEBOOK_SPARK_MASTER") or _HERE)
    given = {key.replace("_", "."): value for key, value in settings.items()}
    if os.environ.get("LAKEBOOK_WAREHOUSE", "").startswith("s3://"):
        given = buckets.with_packages(given)
    given = buckets.joined(given, "spark.jars.packages", ICEBERG_RUNTIME)
    for name, value in (_SETTINGS | given).items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    ship(session)
    return session


def is_running() -> bool:
    """Whether there is a Spark in this process: to ask for a session then gives one of it."""
    # Only who has loaded PySpark can have one.
    loaded = sys.modules.get("pyspark")
    return loaded is not None and loaded.SparkContext._active_spark_context is not None


def is_alive(spark: Any) -> bool:
    """Whether a session can still be worked on: nobody has stopped its Spark, and its JVM answers.

    Of a client of Spark Connect only what the client itself knows: its server would have to be waited for.
    """
    try:
        if _jvm_of(spark) is None:
            return not spark.is_stopped
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:  # noqa: BLE001 - py4j's, or a socket's: nobody is there who could answer
        return False


def require_alive(spark: Any, error: BaseException | None = None) -> None:
    """Refuse a session whose Spark is gone; `error` is what that was noticed by."""
    if not is_alive(spark):
        why = "" if error is None else f" ({reason_of(error)})"
        raise SparkUnsuitable(
            f"it was stopped, or does not answer any more{why}", on="Spark", remedy="Start another session"
        ) from error


def session_with_catalog(spark: SparkSession, name: str, uri: str, token: str, warehouse: Warehouse) -> SparkSession:
    """A session of the same Spark in which an Iceberg REST catalog is known by a name."""
    check_session(spark, warehouse)
    if not hasattr(spark, "newSession"):
        raise SparkUnsuitable(
            "a client of Spark Connect cannot have a session of its own for the catalog",
            on="Spark",
            remedy="Use a session of the usual kind for it; tables, topics, pipelines, views and `book.sql` need none",
        )
    own = spark.newSession()
    settings = {
        "": _CATALOG,
        ".type": "rest",
        ".uri": uri,
        ".token": token,
        # Each statement sees what was committed before it.
        ".cache-enabled": "false",
        ".rest-metrics-reporting-enabled": "false",
    }
    if warehouse.bucket is not None:
        # Iceberg's own way to S3 would need another library, and credentials of its own.
        settings[".io-impl"] = "org.apache.iceberg.hadoop.HadoopFileIO"
    with buckets.unlogged():
        for key, value in settings.items():
            own.conf.set(f"spark.sql.catalog.{name}{key}", value)
    own.conf.set("spark.sql.session.timeZone", "UTC")
    return own


def check_spark(spark: Any, warehouse: Warehouse) -> Any:
    """Refuse what is no Spark session, or was stopped; its JVM, which a client of Spark Connect has not.

    The session can open the warehouse afterwards.
    """
    jvm = _jvm_of(spark)
    buckets.reach(spark, warehouse)
    return jvm


def _jvm_of(spark: Any) -> Any:
    jvm = getattr(spark, "_jvm", None)
    if jvm is None and (hasattr(spark, "sparkContext") or not hasattr(spark, "read")):
        raise SparkUnsuitable("it is not a Spark session, or it has been stopped", on="Spark")
    return jvm


def check_session(spark: Any, warehouse: Warehouse) -> None:
    """Refuse a session in which Iceberg's runtime cannot be loaded; it can open the warehouse afterwards."""
    jvm = check_spark(spark, warehouse)
    found = (
        _server_has_iceberg(spark) if jvm is None else jvm.org.apache.spark.util.Utils.classIsLoadable(_ICEBERG_SOURCE)
    )
    if not found:
        raise SparkUnsuitable(
            "Iceberg's runtime is not on its class path",
            on="Spark",
            remedy=f"Use lakebook.spark_session(), or start Spark with spark.jars.packages={ICEBERG_RUNTIME}",
        )


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one of this thread while the block runs.

    Iceberg writes in the active session of the thread, not in that of the frame; in a thread that is not the one in
    which the session was made, there is none, and its first write would find no catalog.
    """
    jvm = _jvm_of(spark)
    if jvm is None:
        yield  # On the server of a client, every thread that works for it has its session.
        return
    sessions = getattr(jvm, "org.apache.spark.sql.classic.SparkSession")
    former = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if former.isDefined():
            sessions.setActiveSession(former.get())
        else:
            sessions.clearActiveSession()


def _server_has_iceberg(spark: Any) -> bool:
    """Whether the server of a client of Spark Connect has Iceberg's runtime: it cannot be asked but by a use of it."""
    try:
        spark.read.format("iceberg").load("file:///lakebook/no/such/table").schema  # noqa: B018 - this asks
    except Exception as error:  # noqa: BLE001 - that it is not there is no failure
        return "DATA_SOURCE_NOT_FOUND" not in str(error)
    return True


def reason_of(error: BaseException) -> str:
    """The first line of what Spark says about a failure; the rest is a stack."""
    condition = getattr(error, "getCondition", lambda: None)()
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Java's outermost message is often only that a job was aborted; its cause says why.
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if condition == "NOT_NULL_ASSERT_VIOLATION":
        # The names of the column and of what holds it stand in lines of their own.
        path = [line for line in lines[1:] if not line.startswith("If the schema")]
        first = f"{lines[0]} {'.'.join(path)}"
    elif "Traceback (most recent call last):" in lines:
        # Of a function of the user's, Python's own last word.
        own = [line for line in lines if _PYTHON_ERROR.match(line)]
        first = own[-1] if own else lines[0]
    else:
        first = causes[-1] if causes else lines[0] if lines else type(error).__name__
    first = _SECRETS.sub("***", first)[:300]
    return f"[{condition}] {first}" if condition and condition not in first else first
