"""What a pipeline is defined by: checked when it is made, kept as plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import orjson

from lakebook.errors import InvalidPipeline
from lakebook.iceberg.schemas import schema_from, schema_to_json
from lakebook.iceberg.staging import spark_type
from lakebook.names import check_name, check_text, shown
from lakebook.registry.pipelines import TABLE, TOPIC
from lakebook.spark.avro import CONFLUENT, AvroRecords, check_avro
from lakebook.spark.pipelines import AVRO, JSON, PROVENANCE, RAW, Decoder

DEAD_LETTER, STOP = "dead_letter", "stop"
WAIT = "wait"
EARLIEST, LATEST = "earliest", "latest"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_MOST_SQL = 100_000
_MOST_SOURCES = 100
_MOST_SCHEMAS = 1000
_MOST_ID = 2**32 - 1

#: Records and bytes of one batch at most: what is left is the next one's.
BATCH_RECORDS = 10_000_000
BATCH_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class Source:
    """A topic or a table that a pipeline reads."""

    kind: str
    name: str


@dataclass(frozen=True)
class Definition:
    """What a pipeline reads, what it makes of it, and how it goes about it."""

    sources: tuple[Source, ...]
    sql: str | None = None
    function: str | None = None
    decoder: str = RAW
    schema: str | None = None
    #: What stands before each record of Avro, and the schemas by the ids that it names.
    header: str | None = None
    schemas: Mapping[str, str] | None = None
    provenance: bool = False
    bad_records: str = STOP
    evolve: bool = False
    start: str = EARLIEST
    retention: str = WAIT
    #: Seconds between two batches where a daemon runs it; none: it runs only when it is told to.
    interval: float | None = None
    batch_records: int = BATCH_RECORDS
    batch_bytes: int = BATCH_BYTES
    target_file_size: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the registry keeps them."""
        return asdict(self)

    @property
    def of_topics(self) -> bool:
        """Whether it reads topics; else it reads tables."""
        return self.sources[0].kind == TOPIC


def definition_from(values: Mapping[str, Any]) -> Definition:
    """A definition as the registry has kept it; what a later version knows besides is left out."""
    known = {field.name for field in fields(Definition)}
    given = {name: value for name, value in values.items() if name in known}
    given["sources"] = tuple(Source(item["kind"], item["name"]) for item in values["sources"])
    return Definition(**given)


def decoder_of(definition: Definition) -> Decoder:
    """What decodes the records of a definition."""
    if definition.decoder == RAW:
        return Decoder(RAW)
    assert definition.schema is not None
    if definition.decoder == AVRO:
        written = {int(number): schema for number, schema in (definition.schemas or {}).items()}
        return Decoder(AVRO, avro=AvroRecords(definition.schema, definition.header, written))
    columns = columns_of(definition.schema)
    described: Any = spark_type(columns)
    for field, shape in zip(columns.fields, described["fields"], strict=True):
        shape["nullable"] = not field.required
    return Decoder(JSON, described)


def columns_of(text: str) -> Any:
    """The columns that a schema for JSON names, by DDL or in Iceberg's JSON form."""
    columns = schema_from(orjson.loads(text) if text.lstrip().startswith("{") else text)
    _refuse_provenance([field.name for field in columns.fields])
    return columns


def _refuse_provenance(names: Sequence[str]) -> None:
    taken = [name for name in names if name.lower() in PROVENANCE]
    if taken:
        raise InvalidPipeline(f"a column cannot be named {shown(taken[0])}", on="pipeline")


def schema_text(columns: Any) -> str:
    """Columns of a table, without those of provenance, as a definition keeps them."""
    found = schema_to_json(columns)
    found["fields"] = [field for field in found["fields"] if field["name"] not in PROVENANCE]
    found.pop("identifier-field-ids", None)
    return orjson.dumps(found).decode()


def _check_schema(definition: Definition) -> None:
    if definition.schema is None:
        return
    if definition.decoder == JSON:
        try:
            columns_of(definition.schema)
        except orjson.JSONDecodeError:
            raise InvalidPipeline(f"{shown(definition.schema)} is no schema", on="pipeline") from None
    else:
        _refuse_provenance(check_avro(definition.schema))


def _with_newest_schema(definition: Definition) -> Definition:
    """Of several schemas of Avro, that of the highest id has the columns, where nothing else is said."""
    if definition.header is None and definition.schemas is None:
        return definition
    if definition.decoder != AVRO:
        raise InvalidPipeline(
            "a header, or schemas by their ids, were given and no decoder that knows them",
            on="pipeline",
            remedy="Use the decoder avro",
        )
    if definition.header is None:
        raise InvalidPipeline(
            "schemas by their ids were given, and records without a header name none",
            on="pipeline",
            remedy=f"Give header={CONFLUENT!r} too",
        )
    _among("header", definition.header, (CONFLUENT,))
    if definition.schemas is None:
        return definition
    schemas = _by_id(definition.schemas)
    for schema in schemas.values():
        check_avro(schema)
    plain = {str(number): schema for number, schema in schemas.items()}
    return replace(definition, schemas=plain, schema=definition.schema or schemas[max(schemas)])


def _by_id(schemas: object) -> dict[int, str]:
    if not isinstance(schemas, Mapping) or not 0 < len(schemas) <= _MOST_SCHEMAS:
        raise InvalidPipeline(
            f"{shown(schemas)} is no mapping of ids to schemas",
            on="pipeline",
            remedy="Map ids to texts",
        )
    found: dict[int, str] = {}
    for number, schema in schemas.items():
        text = str(number)
        if isinstance(number, bool) or not (text.isascii() and text.isdecimal()) or int(text) > _MOST_ID:
            raise InvalidPipeline(f"{shown(number)} is no id of a schema", on="pipeline", remedy="Use a whole number")
        if not isinstance(schema, str) or int(text) in found:
            raise InvalidPipeline(f"the schema of the id {text} is no text, or is given twice", on="pipeline")
        found[int(text)] = schema
    return found


def _among(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidPipeline(f"{name} cannot be {shown(value)}", on="pipeline", remedy=f"Use {', '.join(choices)}")


def _at_least(name: str, value: object, least: float, *, whole: bool) -> None:
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < float("inf"):  # type: ignore[operator]
        raise InvalidPipeline(f"{name} cannot be {shown(value)}", on="pipeline", remedy=f"At least {least}")


def check_definition(definition: Definition) -> Definition:
    """Return a definition that can be one; whether its query can be run, Spark tells."""
    _check_sources(definition)
    _check_transformation(definition)
    _among("decoder", definition.decoder, (RAW, JSON, AVRO))
    definition = _with_newest_schema(definition)
    if definition.schema is not None and (not isinstance(definition.schema, str) or definition.decoder == RAW):
        raise InvalidPipeline(
            "a schema was given and no decoder that needs one", on="pipeline", remedy="Use the decoder json or avro"
        )
    if definition.decoder == AVRO and definition.schema is None:
        raise InvalidPipeline("the decoder avro needs a schema", on="pipeline", remedy="Give schema=")
    _check_schema(definition)
    if not definition.of_topics and (definition.decoder != RAW or definition.provenance):
        raise InvalidPipeline(
            "a table as a source has columns of its own: there is nothing to decode, and no offsets",
            on="pipeline",
            remedy="Leave decoder and provenance out",
        )
    _among("bad_records", definition.bad_records, (DEAD_LETTER, STOP))
    _among("start", definition.start, (EARLIEST, LATEST))
    _among("retention", definition.retention, (WAIT, STOP))
    if definition.interval is not None:
        _at_least("interval", definition.interval, 0.0, whole=False)
    _at_least("batch_records", definition.batch_records, 1, whole=True)
    _at_least("batch_bytes", definition.batch_bytes, 1, whole=True)
    if definition.target_file_size is not None:
        _at_least("target_file_size", definition.target_file_size, 1, whole=True)
    return definition


def _check_sources(definition: Definition) -> None:
    sources = definition.sources
    if not sources or len(sources) > _MOST_SOURCES or len({(item.kind, item.name) for item in sources}) != len(sources):
        raise InvalidPipeline("a pipeline has one or more different sources", on="pipeline")
    if len({item.kind for item in sources}) != 1:
        raise InvalidPipeline("its sources are all topics, or all tables", on="pipeline")
    for item in sources:
        _among("a source's kind", item.kind, (TOPIC, TABLE))
        check_name(item.kind, item.name)


def _check_transformation(definition: Definition) -> None:
    if definition.sql is not None and definition.function is not None:
        raise InvalidPipeline("SQL and a function were given; only one can be", on="pipeline")
    if definition.sql is not None:
        if not isinstance(definition.sql, str) or not definition.sql.strip() or len(definition.sql) > _MOST_SQL:
            raise InvalidPipeline(f"{shown(definition.sql)} is no query", on="pipeline")
        if "\0" in definition.sql:
            check_text("sql", definition.sql)
    if definition.function is not None and (
        not isinstance(definition.function, str) or not _FUNCTION.fullmatch(definition.function)
    ):
        raise InvalidPipeline(
            f"{shown(definition.function)} names no function", on="pipeline", remedy="Write module:function"
        )
