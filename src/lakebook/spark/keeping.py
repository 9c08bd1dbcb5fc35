"""A session that is started when it is first needed, and another one when its Spark has died."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lakebook.spark.session import is_alive, is_running, require_alive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class KeptSession:
    """Gives the session to work on. One that it has started itself it also stops."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._finding = threading.Lock()
        self._found: SparkSession | None = None
        self._is_made = False

    def __call__(self) -> SparkSession:
        """The session; started now if there is none, or if that which there was has died."""
        with self._finding:
            if self._found is not None and not is_alive(self._found):
                self._let_go()
            if self._found is None:
                # Where Spark runs already, its session is somebody's.
                is_made = not is_running()
                session = self._start()
                # That somebody's may have died: it is not ours to start anew.
                require_alive(session)
                self._found, self._is_made = session, is_made
            return self._found

    def close(self) -> None:
        """Stop the session, if it was started here."""
        with self._finding:
            self._let_go()

    def _let_go(self) -> None:
        found, self._found = self._found, None
        if found is not None and self._is_made:
            stop(found)


def stop(spark: Any) -> None:
    """Stop a session, also one whose JVM is gone: PySpark would keep that, and give it to whoever asks for one."""
    if not is_alive(spark) and _is_followed(spark):
        return  # Somebody has started another since, which PySpark would take for this one.
    try:
        spark.stop()
    except Exception:
        if is_alive(spark):
            raise
        _forget(spark)


def _is_followed(spark: Any) -> bool:
    loaded: Any = sys.modules.get("pyspark")
    present = None if loaded is None else loaded.SparkContext._active_spark_context
    return present is not None and present is not getattr(spark, "sparkContext", None)


def _forget(spark: Any) -> None:
    """Do what is left of PySpark's own `stop` when nobody has answered it."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

    context = getattr(spark, "sparkContext", None)
    if not isinstance(context, SparkContext):
        return
    # It speaks to the JVM no more, and ends its own threads.
    context.stop()
    sessions: Any = SparkSession
    sessions._instantiatedSession = sessions._activeSession = None
    queries: Any = SQLContext
    queries._instantiatedContext = None
    contexts: Any = SparkContext
    with contexts._lock:
        gateway, contexts._gateway, contexts._jvm = contexts._gateway, None, None
    with suppress(Exception):
        gateway.shutdown()
    # Whatever there is left of it ends when its input does.
    with suppress(Exception):
        gateway.proc.stdin.close()
    with suppress(Exception):
        gateway.proc.wait(0)
