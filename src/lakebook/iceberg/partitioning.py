"""Partition specs and sort orders: from texts such as `day(ts)` and `name desc`, and their values as text."""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Context, Decimal, InvalidOperation
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote_plus

import orjson
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema, make_compatible_name
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)
from pyiceberg.utils.datetime import date_to_days, datetime_to_micros, time_to_micros

from lakebook.errors import InvalidPartitioning
from lakebook.iceberg.schemas import Path, describe_type, field_at, find_column, folded, walk
from lakebook.names import shown

#: What a bucket or a width can be at most: Iceberg keeps it in 32 bits.
MAX_PARAMETER = 2**31 - 1
#: No file system takes a longer name, and some of it is left for others.
MAX_PATH_PART = 200

T = TypeVar("T")
_Transform = Transform[Any, Any]

_PLAIN: dict[str, _Transform] = {
    "identity": IdentityTransform(),
    "year": YearTransform(),
    "years": YearTransform(),
    "month": MonthTransform(),
    "months": MonthTransform(),
    "day": DayTransform(),
    "days": DayTransform(),
    "hour": HourTransform(),
    "hours": HourTransform(),
}
_COUNTED: dict[str, Callable[[int], _Transform]] = {"bucket": BucketTransform, "truncate": TruncateTransform}
_NAMES = "identity, year, month, day, hour, bucket(n, column), truncate(n, column)"
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_COUNT = re.compile(r"\s*([0-9]{1,10})\s*,(.*)", re.DOTALL)
_ORDER = re.compile(
    r"(?P<term>.*?\S)\s+(?:(?P<direction>asc|desc)(?:\s+nulls\s+(?P<nulls>first|last))?|nulls\s+(?P<only>first|last))\s*",
    re.DOTALL | re.IGNORECASE,
)
_STORED = re.compile(r"(identity|year|month|day|hour|void)|(bucket|truncate)\[([0-9]{1,10})\]")


# --- partition specs -----------------------------------------------------------


def partition_spec(schema: Schema, partition_by: Sequence[str]) -> PartitionSpec:
    """The partition spec that texts such as `country`, `day(ts)` and `bucket(16, id)` describe.

    A column is named as it is; a field of a struct by its path, as in `address.city`; a name can
    stand in back or double quotes. A text that is the name of a column is that column, whatever
    else it could mean.
    """
    fields: list[PartitionField] = []
    columns = {folded(".".join(path)) for path, _, _ in walk(schema.fields)}
    taken: set[str] = set()
    used: dict[tuple[int, str], str] = {}
    for text in _texts(partition_by, "partition_by"):
        path, field, transform = _term(schema, text)
        # Of year, month, day and hour, the finest says it all.
        key = (field.field_id, transform.dedup_name)
        if key in used:
            _refuse(f"{shown(text)} adds nothing to {shown(used[key])}", remedy="Leave one of them out")
        used[key] = text
        name = _partition_name(".".join(path), transform, columns, taken)
        taken.add(_avro_name(name))
        fields.append(PartitionField(field.field_id, PARTITION_FIELD_ID_START + len(fields), transform, name))
    return PartitionSpec(*fields, spec_id=0)


def spec_texts(spec: PartitionSpec, schema: Schema) -> list[str]:
    """The texts that describe a spec, fit to be given to `partition_spec` again."""
    found = []
    for field in spec.fields:
        texts = _term_texts(schema, field.source_id, field.transform)
        meant = (field.source_id, field.transform)
        found.append(next((text for text in texts if _reads(_meaning, schema, text) == meant), texts[-1]))
    return found


def spec_to_json(spec: PartitionSpec) -> dict[str, Any]:
    """A spec in Iceberg's JSON form."""
    return spec.model_dump(mode="json")


def spec_from_json(value: Mapping[str, Any]) -> PartitionSpec:
    """The spec of Iceberg's JSON form."""
    fields = [
        PartitionField(
            _number(field, "source-id", 1),
            _number(field, "field-id", PARTITION_FIELD_ID_START),
            _stored_transform(field),
            _name(field),
        )
        for field in _json_fields(value)
    ]
    return PartitionSpec(*fields, spec_id=_number(value, "spec-id", 0))


def _partition_name(source: str, transform: _Transform, columns: set[str], taken: set[str]) -> str:
    """Iceberg's name for a partition field, or the next free one: it cannot be that of a column."""
    if isinstance(transform, IdentityTransform):
        if _avro_name(source) in taken:
            _refuse(f"the name {shown(source)} is that of another partition field in a manifest")
        return source
    kind = "trunc" if isinstance(transform, TruncateTransform) else re.sub(r"\[.*", "", str(transform))

    def names() -> Iterator[str]:
        yield f"{source}_{kind}"
        if isinstance(transform, BucketTransform):
            yield f"{source}_{kind}_{transform.num_buckets}"
        elif isinstance(transform, TruncateTransform):
            yield f"{source}_{kind}_{transform.width}"
        yield from (f"{source}_{kind}_{number}" for number in range(2, len(columns) + len(taken) + 3))

    return next(name for name in names() if folded(name) not in columns and _avro_name(name) not in taken)


def _avro_name(name: str) -> str:
    # Manifests are Avro files, where a field is called differently if need be.
    return folded(make_compatible_name(name))


# --- sort orders ---------------------------------------------------------------


def sort_order(schema: Schema, sort_by: Sequence[str]) -> SortOrder:
    """The sort order that texts such as `ts`, `ts desc` and `name asc nulls last` describe.

    Transforms and the names of columns are as in `partition_spec`. Nulls come first if nothing
    is said, and last in descending order.
    """
    fields: list[SortField] = []
    for text in _texts(sort_by, "sort_by"):
        field = _sort_field(schema, text)
        if any((field.source_id, field.transform) == (other.source_id, other.transform) for other in fields):
            _refuse(f"{shown(text)} was there before", on="sort order", remedy="Leave one of them out")
        fields.append(field)
    return SortOrder(*fields, order_id=1) if fields else UNSORTED_SORT_ORDER


def order_texts(order: SortOrder, schema: Schema) -> list[str]:
    """The texts that describe a sort order, fit to be given to `sort_order` again."""
    found = []
    for field in order.fields:
        end = f" {field.direction.value} {field.null_order.value.replace('-', ' ')}"
        texts = [text + end for text in _term_texts(schema, field.source_id, field.transform)]
        found.append(next((text for text in texts if _reads(_sort_field, schema, text) == field), texts[-1]))
    return found


def order_to_json(order: SortOrder) -> dict[str, Any]:
    """A sort order in Iceberg's JSON form."""
    return order.model_dump(mode="json")


def order_from_json(value: Mapping[str, Any]) -> SortOrder:
    """The sort order of Iceberg's JSON form."""
    fields = []
    for field in _json_fields(value):
        try:
            direction, nulls = SortDirection(field.get("direction")), NullOrder(field.get("null-order"))
        except ValueError as error:
            raise InvalidPartitioning(f"{shown(dict(field))} cannot be sorted by", on="sort order") from error
        source_id = _number(field, "source-id", 1)
        fields.append(SortField(source_id, _stored_transform(field), direction=direction, null_order=nulls))
    return SortOrder(*fields, order_id=_number(value, "order-id", 0))


def _sort_field(schema: Schema, text: str) -> SortField:
    term, direction, nulls = text, "asc", None
    match = _ORDER.fullmatch(text)
    if match and not _is_column(schema, text):
        term, direction = match["term"], (match["direction"] or "asc").lower()
        nulls = match["nulls"] or match["only"]
    _, field, transform = _term(schema, term)
    first = nulls.lower() == "first" if nulls else direction == "asc"
    return SortField(
        source_id=field.field_id,
        transform=transform,
        direction=SortDirection(direction),
        null_order=NullOrder.NULLS_FIRST if first else NullOrder.NULLS_LAST,
    )


# --- terms ---------------------------------------------------------------------


def _texts(given: Sequence[str], argument: str) -> Sequence[str]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        _refuse(f"it cannot be {shown(given)}", on=argument, remedy="Give a list of texts")
    return given


def _is_column(schema: Schema, text: str) -> bool:
    return find_column(schema.fields, text) is not None


def _term(schema: Schema, text: str) -> tuple[Path, NestedField, _Transform]:
    """The column and the transform that a text names."""
    source, transform = text, _PLAIN["identity"]
    call = _CALL.fullmatch(text)
    if call and not _is_column(schema, text):
        name, arguments = call[1].lower(), call[2]
        if name in _PLAIN:
            source, transform = arguments, _PLAIN[name]
        elif name in _COUNTED:
            source, transform = _counted(text, name, arguments)
        elif not _is_column(schema, text.strip()):
            _refuse(f"there is no transform {shown(call[1])}", on=shown(text), remedy=f"The transforms are {_NAMES}")
    path = find_column(schema.fields, source) or find_column(schema.fields, source.strip())
    told = shown(source.strip())
    if path is None:
        _refuse(f"there is no column {told}", on=shown(text), remedy="Write it as the schema has it")
    field = field_at(schema.fields, path)
    if any(not field_at(schema.fields, path[:length]).field_type.is_struct for length in range(1, len(path))):
        _refuse(f"the column {told} is in a list or map", on=shown(text), remedy="Name a column that has one value")
    if not transform.can_transform(field.field_type):
        kind = shown(describe_type(field.field_type))
        _refuse(f"{transform} does not fit the column {told}, which is {kind}", on=shown(text))
    return path, field, transform


def _counted(text: str, name: str, arguments: str) -> tuple[str, _Transform]:
    match = _COUNT.fullmatch(arguments)
    if match is None or not 1 <= int(match[1]) <= MAX_PARAMETER:
        remedy = f"Write {name}(n, column), with n from 1 to {MAX_PARAMETER}"
        _refuse("it cannot be read", on=shown(text), remedy=remedy)
    return match[2], _COUNTED[name](int(match[1]))


def _meaning(schema: Schema, text: str) -> tuple[int, _Transform]:
    _, field, transform = _term(schema, text)
    return field.field_id, transform


def _reads(read: Callable[[Schema, str], T], schema: Schema, text: str) -> T | None:
    try:
        return read(schema, text)
    except InvalidPartitioning:
        return None


def _term_texts(schema: Schema, source_id: int, transform: _Transform) -> list[str]:
    """Texts for a column and a transform, the plainest first; a strange name may give it another meaning."""
    path = next((path for path, field, _ in walk(schema.fields) if field.field_id == source_id), None)
    if path is None:  # Dropped since; there is no name for it any more.
        return [f"{transform}(#{source_id})"]
    plain, quoted = ".".join(path), ".".join("`" + part.replace("`", "``") + "`" for part in path)
    if isinstance(transform, IdentityTransform):
        return [plain, quoted, f"identity({plain})", f"identity({quoted})"]
    if isinstance(transform, BucketTransform):
        return [f"bucket({transform.num_buckets}, {column})" for column in (plain, quoted)]
    if isinstance(transform, TruncateTransform):
        return [f"truncate({transform.width}, {column})" for column in (plain, quoted)]
    return [f"{transform}({column})" for column in (plain, quoted)]


def _stored_transform(field: Mapping[str, Any]) -> _Transform:
    value = field.get("transform")
    match = _STORED.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[3] and not 1 <= int(match[3]) <= MAX_PARAMETER):
        _refuse(f"there is no transform {shown(value)}")
    if match[2]:
        return _COUNTED[match[2]](int(match[3]))
    return VoidTransform() if match[1] == "void" else _PLAIN[match[1]]


def _json_fields(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    fields = value.get("fields") if isinstance(value, Mapping) else None
    if not isinstance(fields, list) or not all(isinstance(field, Mapping) for field in fields):
        _refuse(f"{shown(value)} is not in Iceberg's JSON form")
    return fields


def _number(value: Mapping[str, Any], key: str, least: int) -> int:
    found = value.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= MAX_PARAMETER:
        _refuse(f"{key!r} cannot be {shown(found)}")
    return found


def _name(value: Mapping[str, Any]) -> str:
    found = value.get("name")
    if not isinstance(found, str) or not found:
        _refuse(f"'name' cannot be {shown(found)}")
    return found


def _refuse(what: str, *, on: str = "partitioning", remedy: str = "") -> NoReturn:
    raise InvalidPartitioning(what, on=on, remedy=remedy)


# --- partition values ----------------------------------------------------------


def partition_values(spec: PartitionSpec, schema: Schema, record: Record) -> list[Any]:
    """The values of a partition as JSON has them.

    Days, times and timestamps are whole numbers, as in a manifest; decimals, UUIDs and bytes
    (in hexadecimal) are texts, and so are the floats that JSON does not know.
    """
    return [_encoded(value) for _, value in _typed_values(spec, schema, record)]


def partition_to_json(spec: PartitionSpec, schema: Schema, record: Record) -> str:
    """A partition as a JSON text; a partition has one text only."""
    return orjson.dumps(partition_values(spec, schema, record)).decode()


def partition_from_json(spec: PartitionSpec, schema: Schema, text: str) -> Record:
    """The partition of which `partition_to_json` made the text."""
    kinds = _value_types(spec, schema)
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidPartitioning(f"{shown(text)} is not JSON", on="partition") from error
    if not isinstance(values, list) or len(values) != len(kinds):
        _refuse(f"{shown(text)} has not {len(kinds)} values", on="partition")
    return Record(*(_checked(kind, value, is_json=True) for kind, value in zip(kinds, values, strict=True)))


def partition_path(spec: PartitionSpec, schema: Schema, record: Record) -> str:
    """A partition as a folder for people, such as `ts_day=2024-01-05/id_bucket=3`.

    It does not identify the partition: a null and the text `null` look the same. A part too
    long for a file system is cut and ends in a hash.
    """
    texts = partition_texts(spec, schema, record)
    return "/".join(
        _shortened(f"{quote_plus(field.name, safe='')}={quote_plus(text, safe='')}")
        for field, text in zip(spec.fields, texts, strict=True)
    )


def partition_texts(spec: PartitionSpec, schema: Schema, record: Record) -> list[str]:
    """The values of a partition as people write them: a day as a date, for one."""
    texts = []
    for field, (kind, value) in zip(spec.fields, _typed_values(spec, schema, record), strict=True):
        try:
            texts.append(str(field.transform.to_human_string(kind, value)))
        except (OverflowError, ValueError):  # A day or time that Python's calendar does not have.
            texts.append(str(value))
    return texts


def in_partition(spec: PartitionSpec, schema: Schema, text: str, wanted: Mapping[str, Any]) -> bool:
    """Whether the partition of `partition_to_json` has these values by name; a text is one as people see it."""
    record = partition_from_json(spec, schema, text)
    for number, field in enumerate(spec.fields):
        if field.name not in wanted:
            continue
        kind, value, given = _value_types(spec, schema)[number], record[number], wanted[field.name]
        if value is None or given is None:
            if value is not given:
                return False
        elif isinstance(given, str) and not isinstance(kind, StringType):
            if field.transform.to_human_string(kind, value) != given:
                return False
        elif _encoded(_checked(kind, given)) != _encoded(value):
            return False
    return True


def _shortened(part: str) -> str:
    if len(part) <= MAX_PATH_PART:
        return part
    kept = re.sub(r"%.?$", "", part[: MAX_PATH_PART - 17])
    return f"{kept}~{hashlib.sha256(part.encode()).hexdigest()[:16]}"


def _value_types(spec: PartitionSpec, schema: Schema) -> list[IcebergType]:
    try:
        return [field.transform.result_type(schema.find_type(field.source_id)) for field in spec.fields]
    except ValueError as error:
        raise InvalidPartitioning(
            "the schema has not all columns of the partition spec", on="partition", remedy="Give one that has them"
        ) from error


def _typed_values(spec: PartitionSpec, schema: Schema, record: Record) -> list[tuple[IcebergType, Any]]:
    kinds = _value_types(spec, schema)
    if len(record) != len(kinds):
        _refuse(f"{shown(record)} has not {len(kinds)} values", on="partition")
    return [(kind, _checked(kind, record[number])) for number, kind in enumerate(kinds)]


def _checked(kind: IcebergType, value: Any, *, is_json: bool = False) -> Any:
    if value is None:
        return None
    try:
        if is_json and isinstance(value, str) and not isinstance(kind, StringType):
            return _plain(kind, _from_text(kind, value))
        return _plain(kind, value)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InvalidPartitioning(f"{shown(value)} is not {shown(str(kind))}", on="partition") from error


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, (Decimal, uuid.UUID)) else value


def _from_text(kind: IcebergType, text: str) -> Any:
    if isinstance(kind, (BinaryType, FixedType)):
        return bytes.fromhex(text)
    if isinstance(kind, DecimalType):
        return Decimal(text)
    if isinstance(kind, UUIDType):
        return uuid.UUID(text)
    if isinstance(kind, (FloatType, DoubleType)) and text in ("NaN", "Infinity", "-Infinity"):
        return float(text)
    raise ValueError("no text")


def _plain(kind: IcebergType, value: Any) -> Any:
    """The value in the one form that PyIceberg's manifests take, or an error if it is no such value."""
    match kind:
        case BooleanType():
            return _of(bool, value)
        case StringType():
            _of(str, value).encode()  # A lone surrogate fails here.
            return value
        case FloatType() | DoubleType():
            return float(value) if isinstance(value, int) and not isinstance(value, bool) else _of(float, value)
        case DecimalType():
            return _to_scale(_of(Decimal, value), kind)
        case UUIDType():
            return uuid.UUID(bytes=value) if isinstance(value, bytes) else _of(uuid.UUID, value)
        case BinaryType():
            return _of(bytes, value)
        case FixedType():
            if len(_of(bytes, value)) != len(kind):
                raise ValueError("of another length")
            return value
        case DateType() if isinstance(value, date) and not isinstance(value, datetime):
            return date_to_days(value)
        case TimeType() if isinstance(value, time):
            return time_to_micros(value)
        case TimestampType() | TimestamptzType() if isinstance(value, datetime):
            return datetime_to_micros(value)
    bits = 31 if isinstance(kind, (IntegerType, DateType)) else 63
    if isinstance(value, bool) or not -(2**bits) <= _of(int, value) < 2**bits:
        raise ValueError("too large")
    return value


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError("of another type")
    return value


def _to_scale(value: Decimal, kind: DecimalType) -> Decimal:
    # A manifest holds the digits alone: with another scale, they would be another number.
    try:
        scaled = value.quantize(Decimal(1).scaleb(-kind.scale), context=Context(prec=kind.precision))
    except InvalidOperation as error:
        raise ValueError("too many digits") from error
    if scaled != value:
        raise ValueError("too many digits")
    return scaled or abs(scaled)  # There is one zero.
