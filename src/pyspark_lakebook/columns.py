"""Which columns are read and written: names and types, checked before anything runs."""

from __future__ import annotations

from pyspark.sql.types import DataType, StructType

from lakebook.errors import InvalidSchema
from lakebook.names import shown

_CONTENT = ("binary", "string")
#: The types that the columns of records may have when they are written.
WRITTEN = {
    "value": _CONTENT,
    "key": _CONTENT,
    "timestamp": ("timestamp",),
    "headers": tuple(f"array<struct<key:string,value:{kind}>>" for kind in _CONTENT),
    "partition": ("int", "bigint", "smallint", "tinyint"),
}


def check_read(asked: StructType, present: StructType, on: str) -> tuple[str, ...]:
    """The names of the columns that are asked for: all that there are, or some of them, in any order."""
    known = {field.name: field.dataType for field in present.fields}
    for field in asked.fields:
        if field.name not in known:
            raise InvalidSchema(
                f"there is no column {shown(field.name)}", on=on, remedy=f"There are {', '.join(known)}"
            )
        if _text(field.dataType) != _text(known[field.name]):
            raise InvalidSchema(
                f"the column {shown(field.name)} is {_text(known[field.name])}, not {_text(field.dataType)}",
                on=on,
                remedy="Read it as it is, and cast it then",
            )
    return tuple(field.name for field in asked.fields)


def check_written(given: StructType, on: str) -> None:
    """Refuse a frame whose columns are not those of records."""
    names = [field.name for field in given.fields]
    if "value" not in names:
        raise InvalidSchema("the frame has no column value", on=on, remedy=_remedy())
    for field in given.fields:
        kinds = WRITTEN.get(field.name)
        if kinds is None or names.count(field.name) > 1:
            raise InvalidSchema(f"a record has no column {shown(field.name)}", on=on, remedy=_remedy())
        if _text(field.dataType) not in kinds:
            raise InvalidSchema(
                f"the column {field.name} is {_text(field.dataType)}",
                on=on,
                remedy=f"It has to be {' or '.join(kinds)}",
            )


def _text(kind: DataType) -> str:
    return kind.simpleString()


def _remedy() -> str:
    return f"Select value, and if you like {', '.join(name for name in WRITTEN if name != 'value')}"
