"""What differs between SQLite and PostgreSQL: connecting, beginning, and reading errors."""

from __future__ import annotations

import enum
import importlib
import logging
import os
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import psycopg
import sqlalchemy as sa
from filelock import FileLock
from psycopg.conninfo import conninfo_to_dict

from lakebook import forks
from lakebook.clock import SystemClock
from lakebook.config import MEMORY, SQLITE_SCHEME, Settings, redact
from lakebook.errors import (
    BookClosed,
    InvalidSetting,
    LakebookError,
    RegistryCorrupt,
    RegistryNotWritable,
    RegistryUnavailable,
    UnsafeSqlite,
)
from lakebook.registry.statements import POSTGRESQL, SQLITE

LOG = logging.getLogger("lakebook")

# The first SQLite library without the defect that can corrupt a WAL database when
# several connections write and checkpoint at once.
SAFE_WAL_VERSION = (3, 51, 3)

_SEVERAL_SERVERS = "Name several servers in one list: postgresql://one:5432,two:5432/books, or ?host=/one,/two"
_OLD_LIBRARY_REMEDY = "Install pysqlite3 (SQLite 3.53), or another SQLite of at least 3.51.3"

# Of a larger file the rest is copied page by page. It takes addresses, and memory only for what is looked at.
_MAP = "PRAGMA mmap_size = 17179869184"

_WAL_ATTEMPTS = 500
_WAL_PAUSE = 0.01

# Any constant does: it keeps Lakebook's advisory locks apart from an application's.
_EPOCH_LOCK = 0x1A4E_B00C
_MIGRATION_LOCK = 0x1A4E_B00D


class Failure(enum.Enum):
    """What a driver's exception means for the transaction it ended."""

    BUSY = "busy"  # a lock or a serialisation conflict: rolled back, try again
    LOST = "lost"  # the connection is gone: rolled back, unless it was in COMMIT
    DUPLICATE = "duplicate"  # a unique key is taken: rolled back, look for which
    CORRUPT = "corrupt"  # the database file is damaged or is no database
    DENIED = "denied"  # no room, no right, read only: rolled back, and trying again cannot help
    SLOW = "slow"  # a statement took longer than it may: rolled back, and it would take as long again
    POOLED = "pooled"  # a pooler gave the session to somebody else, and the book does not know of it
    OTHER = "other"


# By SQLite's result codes; the drivers do not name all of them. An extended code has its primary
# one in the lowest byte.
_SQLITE_FAILURES = {
    # CONSTRAINT. pysqlite3 does not say which; a check that fails is found out when the next
    # attempt looks for the duplicate, finds none and fails again.
    19: Failure.DUPLICATE,
    5: Failure.BUSY,  # BUSY
    6: Failure.BUSY,  # LOCKED
    15: Failure.BUSY,  # PROTOCOL: lost a race for the WAL's locks
    # IOERR: an fsync that failed may have left the commit in the WAL, so the outcome is unknown.
    10: Failure.LOST,
    14: Failure.LOST,  # CANTOPEN
    8: Failure.DENIED,  # READONLY
    13: Failure.DENIED,  # FULL
    11: Failure.CORRUPT,  # CORRUPT
    26: Failure.CORRUPT,  # NOTADB
}


# By SQLSTATE. The idle time-outs end a session as a restart does; a server that became read-only
# after a fail-over is left, so that the next connection may find the new one.
_POSTGRESQL_FAILURES = {
    "23505": Failure.DUPLICATE,
    "25006": Failure.LOST,
    "25P03": Failure.LOST,
    "25P04": Failure.LOST,
    # A prepared statement that is not there, or is there already: another session than the one it was made in.
    "26000": Failure.POOLED,
    "3F000": Failure.DENIED,  # the search path leads to no schema
    "40001": Failure.BUSY,
    "40P01": Failure.BUSY,
    "42501": Failure.DENIED,
    "42P05": Failure.POOLED,
    "53100": Failure.DENIED,
    "55006": Failure.BUSY,
    "55P03": Failure.BUSY,
    "57014": Failure.SLOW,
    "57P01": Failure.LOST,
    "57P02": Failure.LOST,
    "57P03": Failure.LOST,
    "57P04": Failure.LOST,
    "57P05": Failure.LOST,
}
_POSTGRESQL_CLASSES = {"08": Failure.LOST, "53": Failure.LOST}


def sqlite_driver() -> Any:
    """The SQLite driver: `pysqlite3`, which brings its own library, or Python's."""
    try:
        return importlib.import_module("pysqlite3.dbapi2")
    except ImportError:
        return importlib.import_module("sqlite3.dbapi2")


class Database(ABC):
    """One of the two databases a registry can live in."""

    kind: str
    errors: type[Exception]
    begin_write: str
    begin_snapshot: str
    begin_migration: str
    #: Begins a transaction whose statements are bounded, where those outside of one are not; empty: they are.
    begin_bounded: str = ""
    #: Whether a statement outside of a transaction has to bring its limits along: the session has none.
    brings_limits: bool = False
    #: Whether a server that does not answer may be one that restarts, or that another is about to replace.
    comes_back: bool = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shown = redact(settings.registry)

    @abstractmethod
    def connect(self) -> Any:
        """Open a driver connection that begins no transaction by itself."""

    @abstractmethod
    def place(self) -> str:
        """Which registry it is, of all there are, without who reaches it and with which password."""

    def run_alone(self, connection: Any, sql: str, *values: Any, **options: Any) -> Any:
        """Run a statement outside of a transaction, within the limits of those that read."""
        return connection.execute(sql, *values, **options)

    @contextmanager
    def reading_through(self, connection: Any) -> Iterator[None]:  # noqa: ARG002 - for those to whom it matters
        """While a large part of the registry is read: what was read is not to stay in this process."""
        yield

    @abstractmethod
    def classify(self, error: Exception) -> Failure:
        """Say what an exception of the driver means, from its code alone."""

    @abstractmethod
    def migration_lock(self) -> Any:
        """A context in which no other process creates or migrates this registry."""

    @abstractmethod
    def changes(self) -> ChangeProbe | None:
        """A cheap way to learn that anything was committed, where there is one."""

    @abstractmethod
    def module(self) -> Any:
        """The driver's module."""

    @abstractmethod
    def library(self) -> dict[str, Any]:
        """Name and version of what runs the SQL, for `lakebook doctor`."""

    @abstractmethod
    def begin(self, connection: Any) -> str | None:
        """Begin a write transaction, and say which epoch the book is in."""

    @abstractmethod
    def make_folder(self) -> None:
        """Make the folder in which it is to be, if it is in one; before that nobody can hold the migration lock."""

    @abstractmethod
    def create(self) -> None:
        """Prepare a place that holds nothing yet. The caller holds the migration lock."""

    @contextmanager
    def engine(self) -> Iterator[sa.Engine]:
        """An SQLAlchemy engine over one connection of its own, for migrations."""
        connection = self.connect()
        engine = sa.create_engine(
            f"{self.kind}+{'psycopg' if self.kind == POSTGRESQL else 'pysqlite'}://",
            module=self.module(),
            creator=lambda: connection,
            poolclass=sa.StaticPool,
            hide_parameters=True,
        )
        # Both drivers leave transactions to us; so does SQLAlchemy, unless it is told to begin them.
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(self.begin_migration))
        try:
            yield engine
        finally:
            engine.dispose()
            connection.close()

    def unreachable(self, error: Exception) -> LakebookError:
        """The typed error for a registry that cannot be opened."""
        if self.classify(error) is Failure.CORRUPT:
            return RegistryCorrupt(
                "the file is damaged or is no SQLite database", on=self.shown, remedy="Restore it from a backup"
            )
        if self.classify(error) is Failure.DENIED:
            return RegistryNotWritable(
                f"the database does not take it ({_reason(error, self.settings.registry)})",
                on=self.shown,
                remedy="Check the free space and the rights",
            )
        return RegistryUnavailable(
            f"the registry cannot be reached ({_reason(error, self.settings.registry)})",
            on=self.shown,
            remedy="Check that the server runs and that the address and the rights are right",
        )


class ChangeProbe:
    """Tells whether anything was committed to an SQLite file, by any process.

    The number is a connection's own view, so it changes only with commits of others:
    the probe has a connection to itself that never writes.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._connection: Any = None
        # Always the same cursor, under the lock: making one costs a fifth of the probe.
        self._cursor: Any = None
        self._closed = False
        forks.watch(self)

    def token(self) -> Hashable:
        """A value that changes with every commit; where it cannot be had, one that equals no other."""
        try:
            with self._lock:
                if self._closed:
                    return object()
                if self._cursor is None:
                    self._connection = self._database.connect()
                    self._cursor = self._connection.cursor()
                return id(self._cursor), self._cursor.execute("PRAGMA data_version").fetchone()[0]
        except self._database.errors:
            return object()  # The read that follows says what is wrong.

    def close(self) -> None:
        """Close the probe's connection."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
            self._connection = self._cursor = None

    def after_fork_in_child(self) -> None:
        """Start anew: a thread of the parent may have held the lock."""
        forks.inherited.append((self._connection, self._cursor))
        self._lock = threading.Lock()
        self._connection = self._cursor = None


class SQLite(Database):
    """A registry in one file, or in memory."""

    kind = SQLITE
    begin_write = begin_migration = "BEGIN IMMEDIATE"
    begin_snapshot = "BEGIN"

    def __init__(self, settings: Settings, driver: Any = None) -> None:
        super().__init__(settings)
        self._driver = sqlite_driver() if driver is None else driver
        self.errors = self._driver.Error
        self.in_memory = settings.registry == MEMORY
        self._pid = os.getpid()
        if self.in_memory:
            # The memdb VFS lets the connections of one process share a database under a name.
            self._uri = f"file:/lakebook-{os.getpid()}-{id(self):x}?vfs=memdb"
            self.path = None
        else:
            self.path = Path(settings.registry.removeprefix(SQLITE_SCHEME)).absolute()
            self._uri = self.path.as_uri()

    @property
    def version(self) -> tuple[int, ...]:
        """The library's version."""
        return tuple(int(part) for part in self._driver.sqlite_version.split("."))

    def connect(self) -> Any:
        if self.in_memory and os.getpid() != self._pid:
            raise BookClosed(
                "a book in memory belongs to the process that opened it",
                on=MEMORY,
                remedy="Open a book in a folder to share it between processes",
            )
        connection = self._driver.connect(
            self._uri,
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            timeout=self.settings.lock_timeout,
        )
        try:
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def place(self) -> str:
        # Two machines may have a file of that name each, and one bucket between them.
        return self.shown if self.path is None else f"{_machine()} {SQLITE_SCHEME}{self.path.resolve()}"

    def _set_up(self, connection: Any) -> None:
        # Asked before anything else: merely using a WAL file with an old library is the danger.
        unsafe = not self.in_memory and self.version < SAFE_WAL_VERSION
        if unsafe and connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            raise UnsafeSqlite(
                f"SQLite {self._driver.sqlite_version} can corrupt this book, which is in WAL mode",
                on=self.shown,
                remedy=_OLD_LIBRARY_REMEDY,
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA cache_size = -32768")
        # A look-up in a large book reads pages that are in memory anyway; this saves their copies.
        connection.execute(_MAP)

    @contextmanager
    def reading_through(self, connection: Any) -> Iterator[None]:
        # Every page of a mapped file that was looked at counts as the process's own; else it goes through the cache.
        connection.execute("PRAGMA mmap_size = 0").fetchone()
        yield
        connection.execute(_MAP).fetchone()

    def begin(self, connection: Any) -> str | None:
        connection.execute(self.begin_write)
        row = connection.execute("SELECT epoch FROM book WHERE id = 1").fetchone()
        return str(row[0]) if row else None

    def classify(self, error: Exception) -> Failure:
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return Failure.OTHER
        return _SQLITE_FAILURES.get(code & 0xFF, Failure.OTHER)

    def make_folder(self) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RegistryNotWritable(
                f"its folder cannot be made ({error.strerror})", on=self.shown, remedy="Check the folder and the rights"
            ) from None

    def create(self) -> None:
        """Choose what stays with the file: free pages that can be given back, and WAL.

        WAL where the library is safe with it, and only at creation: a process with an old library
        may have an existing book open.
        """
        if self.in_memory:
            return
        for attempt in count(1):
            connection = self.connect()
            try:
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute("VACUUM")
                if self.version >= SAFE_WAL_VERSION:
                    connection.execute("PRAGMA journal_mode = WAL").fetchone()
                return
            except self.errors as error:
                # Another process is looking at the empty file; this statement does not wait by itself.
                if self.classify(error) is not Failure.BUSY or attempt >= _WAL_ATTEMPTS:
                    raise self.unreachable(error) from error
                SystemClock().sleep(_WAL_PAUSE)
            finally:
                connection.close()

    @contextmanager
    def migration_lock(self) -> Iterator[None]:
        if self.path is None:
            yield
            return
        lock = FileLock(f"{self.path}.lock")
        try:
            lock.acquire()
        except OSError as error:
            raise self.unreachable(error) from error
        try:
            yield
        finally:
            lock.release()

    def changes(self) -> ChangeProbe | None:
        return ChangeProbe(self)

    def module(self) -> Any:
        return self._driver

    def library(self) -> dict[str, Any]:
        safe = self.version >= SAFE_WAL_VERSION
        return {
            "database": "SQLite",
            "version": self._driver.sqlite_version,
            "driver": self._driver.__name__.partition(".")[0],
            "safe": safe,
            "remedy": "" if safe else _OLD_LIBRARY_REMEDY,
        }


# A network that swallows packets is noticed within a minute, also in the middle of a COMMIT. What the address
# itself says has precedence.
_CONNECTION: dict[str, Any] = {
    "application_name": "lakebook",
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


# What a book may ask of a server: one that takes writes, or none of this.
_WRITABLE = ("read-write", "primary", "any")


def _address_values(address: str) -> dict[str, Any]:
    """What an address says, by libpq's names; refused if it does not mean what it seems to."""
    shown = redact(address)
    try:
        given: dict[str, Any] = conninfo_to_dict(address)
    except psycopg.ProgrammingError:
        # The driver's own text repeats the address, password included.
        raise InvalidSetting("it is not a PostgreSQL address", on=shown) from None
    _check_quoted(given, address)
    names = [name for name, _ in parse_qsl(address.partition("?")[2], keep_blank_values=True)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidSetting(
            f"it names `{twice[0]}` more than once, and only the last would count", on=shown, remedy=_SEVERAL_SERVERS
        )
    hosts, addresses, ports = (str(given.get(name) or "").split(",") for name in ("host", "hostaddr", "port"))
    servers = max(len(hosts), len(addresses))
    if len(ports) not in (1, servers) or (given.get("host") and given.get("hostaddr") and len(hosts) != len(addresses)):
        raise InvalidSetting("its servers and ports are not as many", on=shown, remedy=_SEVERAL_SERVERS)
    if servers > 1:
        # Of several servers the one that takes writes: after a fail-over, the new one.
        given.setdefault("target_session_attrs", _WRITABLE[0])
    if given.get("target_session_attrs", _WRITABLE[0]) not in _WRITABLE:
        raise InvalidSetting(
            "it asks for a server that takes no writes, with `target_session_attrs`",
            on=shown,
            remedy=f"Leave it out, or use one of {', '.join(_WRITABLE)}",
        )
    return given


_LONGEST_TIMEOUT = 2**31 - 1

_SET_LIMITS = (
    "SELECT set_config('lock_timeout', %(lock)s, %(local)s), set_config('statement_timeout', %(read)s, %(local)s)"
)

# While another connection does the work, this one rests.
_AT_REST = "SET LOCAL idle_in_transaction_session_timeout = 0;"


def _ms(seconds: float) -> str:
    """A time-out as PostgreSQL takes it; none is 0 there too."""
    return f"{min(max(1, round(seconds * 1000)), _LONGEST_TIMEOUT) if seconds else 0}"


class PostgreSQL(Database):
    """A registry on a PostgreSQL server, 14 or newer."""

    kind = POSTGRESQL
    errors = psycopg.Error
    comes_back = True
    lock_out_writers = f"SELECT pg_advisory_xact_lock({_EPOCH_LOCK})"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        #: Whether a pooler gives every transaction whichever session is free: then nothing is left in one.
        self.pooled = self.brings_limits = settings.pooler == "transaction"
        lock = f"SET LOCAL lock_timeout = {_ms(settings.lock_timeout)};"
        reads = f"SET LOCAL statement_timeout = {_ms(settings.read_timeout)};"
        writes = f"SET LOCAL statement_timeout = {_ms(settings.write_timeout)};"
        # Whoever is frozen within a transaction holds up all who wait for its locks, until the server ends it.
        silence = f"SET LOCAL idle_in_transaction_session_timeout = {_ms(settings.transaction_silence)};"
        begin = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;"
        # The shared lock makes a new epoch wait for the transactions of the old one. It stands in a
        # statement of its own, so that the epoch is read after the lock was waited for.
        self.begin_write = (
            f"{begin} {silence} {writes} {lock if self.pooled else ''}"  # noqa: S608 - numbers and constants
            f" SELECT pg_advisory_xact_lock_shared({_EPOCH_LOCK}); SELECT epoch FROM book WHERE id = 1"
        )
        self.begin_snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY" + (
            f"; {reads} {lock}" if self.pooled else ""
        )
        self._limits = {"lock": _ms(settings.lock_timeout), "read": _ms(settings.read_timeout), "local": self.pooled}
        self.begin_bounded = f"{begin} {silence} {writes} {lock}" if self.pooled else ""
        # Whatever the role's own limits are: a migration takes as long as it takes.
        self.begin_migration = f"BEGIN; SET LOCAL statement_timeout = 0; {_AT_REST} {lock}"

    def connect(self) -> Any:
        connection = self._connect(self.settings.registry, 5 if not self.pooled else None)
        if self.pooled:
            return connection
        try:
            connection.execute(_SET_LIMITS, self._limits)
        except BaseException:
            connection.close()
            raise
        return connection

    def place(self) -> str:
        try:
            connection = self.connect()
            try:
                # One database may have several of them, each in its schema, which the address need not say.
                schema = self.run_alone(connection, "SELECT current_database(), current_schema()").fetchone()
                server = self._server_of(connection)
            finally:
                connection.close()
        except psycopg.Error as error:
            raise self.unreachable(error) from error
        return f"{POSTGRESQL} {server} dbname={schema[0]} schema={schema[1]}"

    def _server_of(self, connection: Any) -> str:
        """Which server it is, however it is reached: itself, or a standby that has taken its place."""
        try:
            (number,) = self.run_alone(connection, "SELECT system_identifier FROM pg_control_system()").fetchone()
        except psycopg.errors.InsufficientPrivilege:
            return f"host={connection.info.host} port={connection.info.port}"
        return f"system={number}"

    def run_alone(self, connection: Any, sql: str, *values: Any, **options: Any) -> Any:
        if not self.pooled:
            return connection.execute(sql, *values, **options)
        # Both are sent before either is answered, and what is sent together is one transaction: the limits
        # cost no way to the server of their own, and end with it.
        with connection.pipeline():
            connection.execute(_SET_LIMITS, self._limits)
            return connection.execute(sql, *values, **options)

    @property
    def can_listen(self) -> bool:
        """Whether there is a session of one's own to listen in."""
        return not self.pooled or bool(self.settings.listen_registry)

    def connect_to_listen(self) -> Any:
        """A connection of one's own, past the pooler."""
        return self._connect(self.settings.listen_registry or self.settings.registry, None)

    def _connect(self, address: str, prepare_after: int | None) -> Any:
        given = _CONNECTION | _address_values(address)
        return psycopg.connect(**given, autocommit=True, prepare_threshold=prepare_after)

    def begin(self, connection: Any) -> str | None:
        # Never prepared: several statements in one text cannot be.
        cursor = connection.execute(self.begin_write, prepare=False)
        row = None
        while True:
            row = cursor.fetchone() if cursor.description else row
            if not cursor.nextset():
                break
        return str(row[0]) if row else None

    def classify(self, error: Exception) -> Failure:
        state = getattr(error, "sqlstate", None)
        if state is None:
            return Failure.LOST if isinstance(error, psycopg.OperationalError) else Failure.OTHER
        return _POSTGRESQL_FAILURES.get(state) or _POSTGRESQL_CLASSES.get(state[:2], Failure.OTHER)

    def make_folder(self) -> None:
        """It is in none."""

    def create(self) -> None:
        """A database is made by whoever runs the server."""

    @contextmanager
    def migration_lock(self) -> Iterator[None]:
        try:
            connection = self.connect()
        except psycopg.Error as error:
            raise self.unreachable(error) from error
        with closing(connection):
            try:
                # The transaction's own, not the session's: behind a pooler the session is somebody else's next.
                connection.execute(f"BEGIN; SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0; {_AT_REST}")
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
            except psycopg.Error as error:
                raise self.unreachable(error) from error
            try:
                yield
            finally:
                self._let_go(connection)

    def _let_go(self, connection: Any) -> None:
        """End the transaction that holds the migration lock."""
        try:
            connection.execute("COMMIT")
        except psycopg.Error as error:
            # Nothing of what was done stands in this transaction: the rest is committed, or has said why not.
            LOG.warning(
                "%s: the session that kept others from making the same registry was lost (%s)",
                self.shown,
                _reason(error, self.settings.registry),
            )

    def changes(self) -> ChangeProbe | None:
        return None

    def module(self) -> Any:
        return psycopg

    def library(self) -> dict[str, Any]:
        with self.connect() as connection:
            number = connection.info.server_version
        safe = number >= 140000
        return {
            "database": "PostgreSQL",
            "version": f"{number // 10000}.{number % 10000}",
            "driver": f"psycopg {psycopg.__version__}",
            "safe": safe,
            "remedy": "" if safe else "Use PostgreSQL 14 or newer",
        }


def _machine() -> str:
    """Which machine this is, of all that may share a bucket."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip() or platform.node()
    except (OSError, ValueError):
        return platform.node()


def database_for(settings: Settings) -> Database:
    """The database that the settings name."""
    if settings.registry.startswith(("postgresql://", "postgres://")):
        return PostgreSQL(settings)
    return SQLite(settings)


def _check_quoted(given: Mapping[str, Any], address: str) -> None:
    """Refuse an address whose password ends elsewhere than its owner thinks: the rest would be told as a host."""
    ports = str(given.get("port") or "").split(",")
    if "@" in str(given.get("host") or "") or not all(port.isdecimal() for port in ports if port):
        raise InvalidSetting(
            "it is not a PostgreSQL address",
            on=redact(address),
            remedy="In a password, write %40 for @, %2F for / and %3A for :",
        )


def _reason(error: Exception, url: str) -> str:
    """The first line of what a driver says, without the password."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    secret = url.partition("://")[2].partition("/")[0].rpartition("@")[0].partition(":")[2]
    return text.replace(secret, "***") if secret else text
