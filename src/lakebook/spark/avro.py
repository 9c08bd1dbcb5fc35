"""Records of Avro: their columns, and reading them where the executors are.

Spark's own reader of Avro is not part of Spark, and its package is not published for every version; fastavro is small,
fast and well kept, and says what it cannot read.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa

from lakebook.errors import InvalidPipeline
from lakebook.names import shown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: The header that Confluent's clients put before a record: a zero byte, and the id of its schema in four bytes.
CONFLUENT = "confluent"
_HEADER = struct.Struct(">bI")


@dataclass(frozen=True)
class AvroRecords:
    """How records of Avro are read: into which columns, and which schemas they may have been written with."""

    #: The schema whose columns the records have.
    schema: str
    #: What stands before each record; none: nothing does.
    header: str | None = None
    #: Schemas by the ids that headers name; none at all: whatever the id, it is the one above.
    written: Mapping[int, str] = field(default_factory=dict)


def avro_fields(schema: str) -> Any:
    """The columns of an Avro schema, as Spark has them."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(_avro_columns(schema))


def check_avro(schema: str) -> list[str]:
    """The names of the columns of a schema; one that cannot be read is refused."""
    return list(_avro_columns(schema).names)


def _avro_schema(schema: str) -> Any:
    try:
        parsed = fastavro.parse_schema(_plain(json.loads(schema)))
    except Exception as error:  # noqa: BLE001 - fastavro has no error of its own
        raise InvalidPipeline(f"it is no Avro schema ({error})", on="pipeline") from None
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise InvalidPipeline("the Avro schema has to be one of a record", on="pipeline")
    return parsed


def _plain(schema: Any) -> Any:
    """A schema without logical types that no column stands for: those are read as the values they are stored as."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    known = schema.get("logicalType") in (*_AVRO_LOGICAL, "decimal")
    return {key: _plain(value) for key, value in schema.items() if known or key != "logicalType"}


def _avro_columns(schema: str) -> pa.Schema:
    parsed = _avro_schema(schema)
    known: dict[str, Any] = {}
    return pa.schema([_avro_field(field["name"], field["type"], known) for field in parsed["fields"]])


_AVRO_PLAIN: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_MOST_DIGITS = 38
_AVRO_LOGICAL: Mapping[str, pa.DataType] = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}


def _avro_field(name: str, kind: Any, known: dict[str, Any]) -> pa.Field:
    if isinstance(kind, list):
        others = [item for item in kind if item != "null"]
        if len(others) != 1:
            raise InvalidPipeline(f"the Avro field {shown(name)} is a union of several types", on="pipeline")
        return pa.field(name, _avro_type(name, others[0], known), nullable="null" in kind)
    return pa.field(name, _avro_type(name, kind, known), nullable=False)


def _avro_type(name: str, kind: Any, known: dict[str, Any]) -> pa.DataType:
    if isinstance(kind, str):
        if kind in _AVRO_PLAIN:
            return _AVRO_PLAIN[kind]
        if kind in known:
            return known[kind]
    elif isinstance(kind, dict):
        logical = kind.get("logicalType")
        if logical == "decimal":
            if not 0 < kind.get("precision", 0) <= _MOST_DIGITS:
                raise InvalidPipeline(
                    f"the Avro field {shown(name)} has more than {_MOST_DIGITS} digits", on="pipeline"
                )
            return pa.decimal128(kind["precision"], kind.get("scale", 0))
        if isinstance(logical, str) and logical in _AVRO_LOGICAL:
            return _AVRO_LOGICAL[logical]
        found = _avro_complex(kind, known)
        if found is not None:
            if "name" in kind:
                known[kind["name"]] = found
            return found
    raise InvalidPipeline(f"the Avro field {shown(name)} has a type that is not read: {shown(kind)}", on="pipeline")


def _avro_complex(kind: Mapping[str, Any], known: dict[str, Any]) -> pa.DataType | None:
    match kind["type"]:
        case "record":
            return pa.struct([_avro_field(field["name"], field["type"], known) for field in kind["fields"]])
        case "enum":
            return pa.string()
        case "fixed":
            return pa.binary()
        case "array":
            return pa.list_(_avro_field("element", kind["items"], known))
        case "map":
            return pa.map_(pa.string(), _avro_field("value", kind["values"], known))
        case str() as plain if plain in _AVRO_PLAIN:
            return _AVRO_PLAIN[plain]
    return None


def read_avro(frame: DataFrame, records: AvroRecords, decoded: str, reason: str) -> DataFrame:
    """Decode by fastavro, where the executors are: Spark's own reader of Avro is not part of it."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StringType, StructField, StructType

    optional = StructType([StructField(f.name, f.dataType, True) for f in avro_fields(records.schema).fields])
    wanted = StructType(
        [*frame.schema.fields, StructField(decoded, optional, True), StructField(reason, StringType(), True)]
    )
    decoded_type = to_arrow_schema(StructType([StructField(decoded, optional, True)])).field(0).type
    return frame.mapInArrow(_avro_reader(records, decoded_type, (decoded, reason)), wanted)


#: What is in a record, or why that cannot be told.
_Read = tuple[Any, str | None]


def _value_reader(records: AvroRecords) -> Callable[[bytes | None], _Read]:
    """What reads the value of one record."""
    wanted = _avro_schema(records.schema)
    written = {number: _avro_schema(schema) for number, schema in records.written.items()}

    def body(value: bytes, start: int, schema: Any) -> _Read:
        stream = io.BytesIO(value)
        stream.seek(start)
        try:
            found = fastavro.schemaless_reader(stream, schema, None if schema is wanted else wanted)
        except Exception as error:  # noqa: BLE001 - whatever it is, the record does not fit
            return None, f"it is not Avro that fits the schema ({type(error).__name__})"
        if stream.tell() != len(value):
            return None, "there is more in it than the schema says"
        return found, None

    def headed(value: bytes) -> _Read:
        if len(value) < _HEADER.size or value[0] != 0:
            return None, "it does not begin with the header of a schema registry"
        _, number = _HEADER.unpack_from(value)
        schema = written.get(number) if written else wanted
        if schema is None:
            return None, f"its schema has the id {number}, which the pipeline does not know"
        return body(value, _HEADER.size, schema)

    def one(value: bytes | None) -> _Read:
        if value is None:
            return None, "it has no value"
        return headed(value) if records.header == CONFLUENT else body(value, 0, wanted)

    return one


def _avro_reader(
    records: AvroRecords, kind: pa.DataType, made: Sequence[str]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        one = _value_reader(records)

        def fitting(found: Any) -> bool:
            try:
                pa.scalar(found, kind)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                return False
            return True

        def columns(rows: list[_Read]) -> pa.Array:
            return pa.array([row[0] for row in rows], kind)

        for batch in batches:
            rows = [one(value.as_py()) for value in batch.column("value")]
            try:
                found = columns(rows)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                # One of them has a value that its type cannot hold.
                rows = [row if fitting(row[0]) else (None, "a value is out of the range of its type") for row in rows]
                found = columns(rows)
            arrays = [found, pa.array([row[1] for row in rows], pa.string())]
            names = [*batch.schema.names, *made]
            yield pa.RecordBatch.from_arrays([*batch.columns, *arrays], names=names)

    return read
