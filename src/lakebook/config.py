"""Settings of a book: defaults, `lakebook.toml`, `LAKEBOOK_*` and keywords, in that order."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import SplitResult, urlsplit

from lakebook.errors import InvalidSetting
from lakebook.names import shown

CONFIG_FILE = "lakebook.toml"
MEMORY = ":memory:"
SQLITE_SCHEME = "sqlite:///"
_POSTGRESQL = ("postgresql://", "postgres://", "postgresql+psycopg://")
_SECRETS = ("s3_access_key_id", "s3_secret_access_key", "s3_session_token")
_PASSWORD = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)", re.IGNORECASE)
_USER_INFO = re.compile(r"(://[^/:@]*):(?:(?!://).)*@", re.DOTALL)
_DAY = 86_400


def _setting(
    default: Any, doc: str, *, least: float | None = None, most: float | None = None, among: tuple[str, ...] = ()
) -> Any:
    return field(default=default, metadata={"doc": doc, "least": least, "most": most, "among": among})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything about a book that can be set.

    Each one can be given to `lakebook.open` as a keyword, as `LAKEBOOK_<NAME>` in the
    environment, or as a key in `lakebook.toml`; the first of these that names it wins.
    """

    registry: str = _setting("", "Where the registry is: `sqlite:///path` or `postgresql://…`.")
    warehouse: str = _setting(
        "",
        "Root of the warehouse: a folder, `file://…` or `s3://bucket/prefix`. A book remembers it."
        " Beside a registry file it is the folder `warehouse`.",
    )
    cache_staleness: float = _setting(
        0.0,
        "Seconds for which the read cache may answer without asking the registry whether something"
        " changed. 0: every answer is as new as the registry.",
        least=0,
    )
    cache_segments: int = _setting(100_000, "Segments the read cache keeps at most; 0 turns it off.", least=0)
    temporary_file_grace: float = _setting(
        3600.0, "Seconds a retired file stays in `temporary_files` before it may be deleted.", least=0
    )
    append_turn: float = _setting(30.0, "Seconds a partition's append turn lasts without an append.", least=0.001)
    lock_timeout: float = _setting(10.0, "Seconds one statement waits for a lock.", least=0.001)
    read_timeout: float = _setting(
        600.0,
        "Seconds one statement that only reads may take on PostgreSQL before the server ends it. 0: there is no limit.",
        least=0,
    )
    write_timeout: float = _setting(
        300.0,
        "Seconds one statement of a write transaction may take on PostgreSQL before the server ends it."
        " 0: there is no limit.",
        least=0,
    )
    outage_seconds: float = _setting(
        15.0,
        "Seconds for which an open book waits for a PostgreSQL server that is away: it restarts, or another takes its"
        " place. Writes wait at most `retry_seconds`. 0: it is said at once.",
        least=0,
    )
    pooler: str = _setting(
        "none",
        "Whether `registry` leads to a pooler that gives each transaction whichever session is free (`transaction`)."
        " Then nothing is prepared or set in a session.",
        among=("none", "transaction"),
    )
    listen_registry: str = _setting(
        "",
        "Address of the PostgreSQL server itself, to listen for commits of other processes, where `registry` leads to a"
        " pooler. Without it they are looked for every `event_poll` seconds.",
    )
    transaction_silence: float = _setting(
        30.0,
        "Seconds that a write transaction may rest on PostgreSQL before the server ends it: so a frozen process"
        " holds up nobody for longer.",
        least=0.001,
    )
    retry_attempts: int = _setting(10, "How often a write transaction is tried.", least=1)
    retry_seconds: float = _setting(60.0, "Seconds after which a write transaction is tried no more.", least=0)
    connections: int = _setting(8, "Registry connections kept open while idle.", least=1)
    lease_seconds: float = _setting(
        60.0, "Seconds a reader's lease lasts; it is renewed three times as often while the reader lives.", least=0.1
    )
    lease_maximum: float = _setting(
        86_400.0, "Seconds after which a lease of a `read()` outside a `with` block is renewed no more.", least=1
    )
    insert_alive: float = _setting(
        600.0, "Seconds an insert may be silent before a sweep takes it for dead and fences it.", least=0.1
    )
    sweep_grace: float = _setting(
        3600.0,
        "Seconds after which the folder of a finished insert is swept once more, for late executors, and forgotten.",
        least=0,
    )
    history_seconds: float = _setting(
        432_000.0, "Seconds for which a table's versions are kept, unless the table says otherwise.", least=0
    )
    history_versions: int = _setting(
        20, "Versions of a table that are kept at least, unless the table says otherwise.", least=1
    )
    measure_on_spark: int = _setting(
        4 * 1024**3, "Bytes of new files from which their checksums are taken by a Spark job.", least=0
    )
    cache_footers: int = _setting(64 * 1024**2, "Bytes of footers kept in memory at most.", least=0)
    cache_planned_files: int = _setting(100_000, "Files of plans kept in memory at most.", least=0)
    outside_hold: float = _setting(
        5.0,
        "Seconds for which this book's own changes of a table wait at most for the retry of an outside engine"
        " whose commit they made fail. 0: they never wait.",
        least=0,
    )
    publish: str = _setting(
        "async",
        "Whether an insert returns when it is committed (`async`), when the Iceberg snapshot covers it (`sync`),"
        " or whether nothing is published unless it is asked for (`off`).",
        among=("async", "sync", "off"),
    )
    publish_lag: float = _setting(
        1.0, "Seconds for which the background thread waits for more inserts before it publishes.", least=0
    )
    published_grace: float = _setting(
        86_400.0,
        "Seconds a file that was ever published stays after the last snapshot that lists it has left the"
        " metadata: readers of other engines hold no lease.",
        least=60,
    )
    outside_grace: float = _setting(
        259_200.0,
        "Seconds after which what outside engines wrote, and no snapshot lists, is swept.",
        least=259_200,
    )
    catalog_lease: float = _setting(
        3600.0, "Seconds for which a version that was loaded through a catalog is pinned.", least=1
    )
    snapshots_kept: int = _setting(
        100, "Snapshots that a table's Iceberg metadata lists at most, beside those of tags and branches.", least=1
    )
    metadata_kept: int = _setting(20, "Former metadata files of a table that are kept.", least=1)
    publish_backlog: int = _setting(
        1000,
        "Versions of a table that may be unpublished before whoever changes it next publishes them itself."
        " 0: there is no limit.",
        least=0,
    )
    astha_lease: float = _setting(
        5.0, "Seconds for which the process that delivers events may be silent before another takes over.", least=0.1
    )
    event_poll: float = _setting(
        1.0, "Seconds after which events are looked for though nothing has announced one.", least=0.01
    )
    delivery_attempts: int = _setting(
        30, "How often an event is handed to a subscriber that is healthy before it is parked.", least=1
    )
    delivery_pause: float = _setting(60.0, "Seconds between two attempts to hand an event over, at most.", least=0)
    events_kept: float = _setting(
        3600.0, "Seconds for which events are kept though every subscriber has taken them.", least=0
    )
    events_most: int = _setting(
        1_000_000, "Events that a subscriber may be behind before it loses its cursor and is refreshed.", least=1
    )
    events_oldest: float = _setting(
        604_800.0, "Seconds that a subscriber may be behind before it loses its cursor and is refreshed.", least=1
    )
    maintenance_interval: float = _setting(
        60.0, "Seconds between two rounds of the janitor and of the snapshotter.", least=0.05
    )
    checkpoint_interval: float = _setting(
        300.0,
        "Seconds between two checkpoints that the janitor writes into the warehouse, where something has changed:"
        " what `lakebook rebuild` begins from. 0: none is written.",
        least=0,
    )
    checkpoints_kept: int = _setting(3, "Checkpoints that are kept in the warehouse, the newest ones.", least=1)
    maintenance_kept: float = _setting(
        604_800.0, "Seconds for which the history of maintenance and finished updates is kept.", least=0
    )
    tag_seconds: float = _setting(
        0.0, "Seconds between two tags that the snapshotter puts on a table. 0: none by time.", least=0
    )
    tag_bytes: int = _setting(
        0, "Bytes of new files after which the snapshotter puts a tag on a table. 0: none by size.", least=0
    )
    tag_queries: str = _setting(
        "no", "Whether a state that was loaded through a catalog gets a tag.", among=("yes", "no")
    )
    tags_kept: int = _setting(
        10, "Tags of the snapshotter's own that a table has at most; those made by hand do not count.", least=1
    )
    compact_target: int = _setting(
        128 * 1024**2, "Bytes that a file has at best; files of less than three quarters are small.", least=1
    )
    compact_files: int = _setting(5, "Small files of a partition from which they are worth a compaction.", least=2)
    compact_bytes: int = _setting(
        4 * 1024**3, "Bytes that one compaction rewrites at most; the next one goes on.", least=1
    )
    compact_delay: float = _setting(
        10.0, "Seconds for which the compactor waits for more files before it looks at a table.", least=0
    )
    worker_interval: float = _setting(
        10.0,
        "Seconds between two looks of a daemon that waits for the turn at what it could do meanwhile: compact tables,"
        " run pipelines, build views. 0: it does nothing.",
        least=0,
    )
    producer_buffer: int = _setting(
        64 * 1024**2, "Bytes of records that a producer holds at most; whoever sends more waits.", least=1
    )
    producer_linger: float = _setting(
        0.05, "Seconds for which a producer waits for more records before it stores a segment.", least=0
    )
    upload_seconds: float = _setting(
        60.0, "Seconds that storing a segment may take before it is given up and tried again elsewhere.", least=0.01
    )
    produce_seconds: float = _setting(
        120.0, "Seconds for which a record is tried to be stored before its sender is told that it failed.", least=0.1
    )
    group_session: float = _setting(
        10.0, "Seconds for which a member of a consumer group may be silent before its partitions pass on.", least=0.1
    )
    poll_seconds: float = _setting(
        300.0, "Seconds that a member of a consumer group may let pass between two polls before it leaves.", least=0.1
    )
    group_kept: float = _setting(
        604_800.0, "Seconds after which a consumer group without members and commits is forgotten.", least=0
    )
    merge_target: int = _setting(64 * 1024**2, "Bytes that merged segments of a topic have at most.", least=1)
    merge_segments: int = _setting(10, "Small segments in a row from which they are worth a merge.", least=2)
    merge_quiet: float = _setting(
        60.0, "Seconds for which segments lie before they are merged: a busy topic makes larger ones soon.", least=0
    )
    max_partitions: int = _setting(10_000, "Partitions a topic may have.", least=1)
    spark_master: str = _setting(
        "local[*]", "The Spark that is started where none is given: `local[*]`, or a cluster's `spark://…`."
    )
    s3_endpoint: str = _setting(
        "", "Address of the store that has the bucket, `https://host`; AWS's own, unless it is given."
    )
    s3_region: str = _setting("", "Region of the bucket; else the one that AWS's own tools would take.")
    s3_path_style: str = _setting(
        "auto",
        "Whether the bucket stands in the path of an address (`yes`) or in its host (`no`). `auto`: in the path where"
        " an endpoint is given.",
        among=("auto", "yes", "no"),
    )
    s3_access_key_id: str = _setting(
        "", "Key for the bucket; without it each process looks for credentials as AWS's own tools do."
    )
    s3_secret_access_key: str = _setting("", "The key's secret. It is shown nowhere.")
    s3_session_token: str = _setting("", "The token of a key that is good for a while. It is shown nowhere.")
    # What speaks to buckets has no room for every number of seconds.
    s3_request_seconds: float = _setting(
        60.0, "Seconds that one request to the bucket may take, at most a day.", least=0.1, most=_DAY
    )
    s3_retry_seconds: float = _setting(
        120.0, "Seconds for which a request to the bucket that fails is tried again, at most a day.", least=0, most=_DAY
    )

    def __repr__(self) -> str:
        shown_fields = ", ".join(f"{f.name}={getattr(self.redacted(), f.name)!r}" for f in fields(self))
        return f"Settings({shown_fields})"

    def redacted(self) -> Settings:
        """The same settings without a secret in them, fit to be printed."""
        hidden: dict[str, Any] = {name: "***" for name in _SECRETS if getattr(self, name)}
        return replace(
            self,
            registry=redact(self.registry),
            warehouse=redact(self.warehouse),
            listen_registry=redact(self.listen_registry),
            s3_endpoint=redact(self.s3_endpoint),
            **hidden,
        )


def redact(text: str) -> str:
    """A URL, or a text with URLs in it, without passwords and without queries, where secrets may stand too."""
    # libpq also takes "host=… password=…", and it may be given where a URL or a folder is meant.
    text = _PASSWORD.sub(r"\1***", text)
    if "://" not in text:
        return text
    # A password that nobody has quoted may have any of the characters that end it.
    return _USER_INFO.sub(r"\1:***@", text).partition("?")[0]


def split_url(url: str, on: str, remedy: str = "") -> SplitResult:
    """The parts of an address; what cannot be taken apart is refused, as the setting `on`."""
    try:
        return urlsplit(url)
    except ValueError:
        # Python's own text may repeat a part of it, and a secret may stand there.
        raise InvalidSetting("it is not an address that can be read", on=on, remedy=remedy) from None


#: What a configuration file has beside settings.
_PIPELINES = "pipelines"
# What says which book it is, and not how one is used.
_PLACES = ("registry", "warehouse", "listen_registry")
_REGISTRIES = "Use a folder, ':memory:', sqlite:///path or postgresql://…"


def load_settings(
    target: str | os.PathLike[str] | None,
    given: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    named: bool = False,
) -> Settings:
    """Put the settings of the book at `target` together from all places they may stand.

    With `named`, the target is one that somebody has just named, and is where it says: what the environment says
    about the registry and the warehouse is about another book. Only keywords and the file in its own folder count.
    Without it a folder is where a book is unless the environment has another place for it: so a program that names a
    folder outgrows it by settings alone. An address is a registry in any case, and what the environment says about a
    warehouse counts for it unless that is said of another registry.
    """
    environment = os.environ if environment is None else environment
    place = os.fspath(target) if target is not None else None
    file = _config_file(place, environment)
    values: dict[str, Any] = {}
    if file is not None:
        values |= _from_file(file)
    values |= _from_environment(environment)
    if named:
        own = _own_file(place)
        said = _from_file(own) if own is not None else {}
        values = _without_places(values)
        values |= {name: value for name, value in said.items() if name in _PLACES}
    elif place is not None and is_registry_url(place) and not _same_registry(place, values.get("registry", place)):
        values = _without_places(values)
    values |= {name: _convert(name, value, "keyword") for name, value in given.items() if value is not None}
    values |= _places(place, values)
    if values.get("listen_registry"):
        values["listen_registry"] = _registry_url(values["listen_registry"])
    return Settings(**values)


def _without_places(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _PLACES}


def _same_registry(one: str, other: str) -> bool:
    """Whether two addresses lead to the same registry, with whatever driver, user and password."""
    places = [url.partition("://")[2].rpartition("@")[2] for url in (one, other)]
    return places[0] == places[1]


def is_registry_url(target: str) -> bool:
    """Whether a target names a database rather than a folder."""
    return target.startswith((*_POSTGRESQL, "sqlite://"))


def _config_file(place: str | None, environment: Mapping[str, str]) -> Path | None:
    named = environment.get("LAKEBOOK_CONFIG")
    if named:
        if not Path(named).is_file():
            raise InvalidSetting(f"there is no file {shown(named)}", on="LAKEBOOK_CONFIG", remedy="Name a TOML file")
        return Path(named)
    if _is_folder(place):
        return _own_file(place)
    here = Path(CONFIG_FILE)
    return here if here.is_file() else None


def _is_folder(place: str | None) -> TypeGuard[str]:
    return place is not None and place != MEMORY and not is_registry_url(place)


def _own_file(place: str | None) -> Path | None:
    """The file in the folder that is a book."""
    file = Path(place) / CONFIG_FILE if _is_folder(place) else None
    return file if file is not None and file.is_file() else None


def declared_pipelines(
    target: str | os.PathLike[str] | None, environment: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """The pipelines that the configuration file of a book declares, by their names: tables `[pipelines.NAME]`."""
    place = os.fspath(target) if target is not None else None
    file = _config_file(place, os.environ if environment is None else environment)
    found = {} if file is None else _content(file).get(_PIPELINES, {})
    if not isinstance(found, dict) or not all(isinstance(item, dict) for item in found.values()):
        raise InvalidSetting(
            "its pipelines are no tables", on=str(file), remedy="Write [pipelines.NAME], and the options below it"
        )
    return found


def _content(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"it is not TOML ({error})", on=str(file), remedy="Correct the file") from None
    except OSError as error:
        raise InvalidSetting(f"it cannot be read ({error.strerror})", on=str(file)) from None


def _from_file(file: Path) -> dict[str, Any]:
    content = {name: value for name, value in _content(file).items() if name != _PIPELINES}
    values = {name: _convert(name, value, str(file)) for name, value in content.items()}
    warehouse = values.get("warehouse")
    if warehouse and "://" not in warehouse:
        values["warehouse"] = str(file.parent / warehouse)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    # LAKEBOOK_BOOK names the book itself, LAKEBOOK_CONFIG the file, the rest are switches of tests.
    reserved = {"LAKEBOOK_BOOK", "LAKEBOOK_CONFIG", "LAKEBOOK_FAILPOINTS"}
    return {
        name.removeprefix("LAKEBOOK_").lower(): _convert(name.removeprefix("LAKEBOOK_").lower(), value, name)
        for name, value in environment.items()
        if name.startswith("LAKEBOOK_") and name not in reserved and not name.startswith("LAKEBOOK_TEST_")
    }


def _convert(name: str, value: Any, where: str) -> Any:
    known = {f.name: f for f in fields(Settings)}
    if name not in known:
        raise InvalidSetting(
            f"there is no setting {shown(name)}", on=where, remedy=f"The settings are {', '.join(sorted(known))}"
        )
    kind = {"str": str, "int": int, "float": float}[str(known[name].type)]
    try:
        if isinstance(value, bool) or (kind is str and not isinstance(value, str | os.PathLike)):
            raise ValueError
        converted = os.fspath(value) if kind is str else kind(value)
    except (TypeError, ValueError):
        shown_value = "its value" if name in ("registry", "warehouse", "listen_registry", *_SECRETS) else shown(value)
        raise InvalidSetting(f"{shown_value} is not a {kind.__name__}", on=f"{where}: {name}") from None
    least, most = known[name].metadata["least"], known[name].metadata["most"]
    # Written so that NaN is refused too.
    if least is not None and not (least <= converted < float("inf") and (most is None or converted <= most)):
        remedy = f"At least {least}" if most is None else f"At least {least} and at most {most}"
        raise InvalidSetting(f"{shown(value)} is not in its range", on=f"{where}: {name}", remedy=remedy)
    among = known[name].metadata["among"]
    if among and converted not in among:
        raise InvalidSetting(f"it cannot be {shown(value)}", on=f"{where}: {name}", remedy=f"Use {', '.join(among)}")
    return converted


def _places(place: str | None, values: Mapping[str, Any]) -> dict[str, str]:
    """Decide where registry and warehouse are. An existing book has recorded its warehouse."""
    named = values.get("registry")
    if place is None:
        # A folder may stand there too.
        place, named = named or None, None
        if place is None:
            raise InvalidSetting(
                "no book was given",
                on="lakebook.open",
                remedy="Give a folder, ':memory:' or a registry URL, or set LAKEBOOK_REGISTRY",
            )
    if place == MEMORY:
        return {"registry": MEMORY, "warehouse": "memory://"}
    if is_registry_url(place) or ("://" in place and split_url(place, redact(place), _REGISTRIES).scheme):
        return {"registry": _registry_url(place), "warehouse": values.get("warehouse", "")}
    if "\0" in place or not place:
        raise InvalidSetting(f"{shown(place)} is not a folder", on="lakebook.open")
    return {
        "registry": _registry_url(named) if named else f"{SQLITE_SCHEME}{place}/registry.db",
        "warehouse": values.get("warehouse", ""),
    }


def _registry_url(url: str) -> str:
    """Refuse what is no address of a registry; one without the driver's name, which SQLAlchemy would have in it."""
    if "\0" in url:
        raise InvalidSetting("there is no such place", on=redact(url), remedy=_REGISTRIES)
    if url.startswith(_POSTGRESQL):
        return url.replace("postgresql+psycopg://", "postgresql://", 1)
    path = url.removeprefix(SQLITE_SCHEME)
    if not url.startswith("sqlite://"):
        raise InvalidSetting("this is not a place for a registry", on=redact(url), remedy=_REGISTRIES)
    if path == MEMORY or path in ("", url):
        raise InvalidSetting("it names no file", on=redact(url), remedy="Write sqlite:///path/to/registry.db")
    return url
