"""Column lists and types as Spark writes them: `id BIGINT NOT NULL, tags ARRAY<STRING>`.

The text is cut into tokens as Spark's SQL is, and then read strictly. A full SQL parser is no
help here: it takes `period` and `unique` for clauses and not for names, and it passes over
what it does not know.
"""

from __future__ import annotations

import re
from typing import NoReturn

import sqlglot
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)
from sqlglot import Token, TokenType
from sqlglot.errors import SqlglotError

from lakebook.errors import InvalidSchema
from lakebook.names import shown

#: How many levels a column may have, itself being the first.
MAX_DEPTH = 100
#: The id of a field that has not been given one.
NO_ID = -1
#: Spark's, for a decimal of which nothing is said.
DEFAULT_PRECISION, DEFAULT_SCALE = 10, 0

_TYPES: dict[str, PrimitiveType] = {
    "BOOLEAN": BooleanType(),
    "TINYINT": IntegerType(),
    "BYTE": IntegerType(),
    "SMALLINT": IntegerType(),
    "SHORT": IntegerType(),
    "INT": IntegerType(),
    "INTEGER": IntegerType(),
    "BIGINT": LongType(),
    "LONG": LongType(),
    "FLOAT": FloatType(),
    "REAL": FloatType(),
    "DOUBLE": DoubleType(),
    "DOUBLE PRECISION": DoubleType(),
    "DATE": DateType(),
    "TIME": TimeType(),
    "TIMESTAMP": TimestamptzType(),
    "TIMESTAMP_LTZ": TimestamptzType(),
    "TIMESTAMP_NTZ": TimestampType(),
    "STRING": StringType(),
    "BINARY": BinaryType(),
    "UUID": UUIDType(),
}
_TEXTS = frozenset({"CHAR", "CHARACTER", "VARCHAR"})
_DECIMALS = frozenset({"DECIMAL", "DEC", "NUMERIC"})
_KNOWN = ", ".join(
    (*_TYPES, "CHAR(n)", "VARCHAR(n)", "DECIMAL(p, s)", "ARRAY<type>", "MAP<type, type>", "STRUCT<name: type, ...>")
)
_WORD = re.compile(r"\w+")


def parse_ddl(text: str) -> StructType:
    """The columns that a text describes, as a struct whose fields have no ids yet."""
    reading = _Reading(text)
    fields = reading.fields(1)
    reading.expect_end()
    return StructType(*fields)


def parse_type(text: str) -> IcebergType:
    """The type that a text such as `ARRAY<STRING>` describes, its fields without ids."""
    reading = _Reading(text)
    kind = reading.type(1)
    reading.expect_end()
    return kind


class _Reading:
    """A text and how far it has been read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._column = ""
        try:
            # Behind a bracket no word is a command: SHOW would swallow the rest of the line.
            self._tokens: list[Token] = sqlglot.tokenize("(" + text, read="spark")[1:]
        except SqlglotError as error:
            raise InvalidSchema(
                "a quote or a comment is not closed", on=f"schema text {shown(text)}", remedy="Close it"
            ) from error

    def fields(self, depth: int) -> list[NestedField]:
        """One or more columns, or fields of a struct."""
        found = [self._field(depth)]
        while self._take(","):
            found.append(self._field(depth))
        return found

    def type(self, depth: int) -> IcebergType:
        """A type, with all that it consists of."""
        if depth > MAX_DEPTH:
            self._refuse(f"a type is nested more than {MAX_DEPTH} levels deep")
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        word = "" if token is None or _is_quoted(token) else " ".join(token.text.upper().split())
        if word in _TYPES or word in _TEXTS or word in _DECIMALS or word in ("ARRAY", "MAP", "STRUCT"):
            self._at += 1
        else:
            wanted = f"the type of {shown(self._column)}" if self._column else "a type"
            self._refuse(f"expected {wanted}, found {self._found()}", f"The types are {_KNOWN}")
        if word in _TYPES:
            return _TYPES[word]
        if word in _TEXTS:
            self._numbers(1)
            return StringType()
        if word in _DECIMALS:
            return self._decimal()
        return self._nested(word, depth)

    def expect_end(self) -> None:
        """Refuse what follows."""
        if self._at < len(self._tokens):
            self._refuse(f"expected a comma or the end, found {self._found()}")

    def _nested(self, word: str, depth: int) -> IcebergType:
        self._expect("<")
        kind: IcebergType
        if word == "STRUCT":
            kind = StructType(*self.fields(depth + 1))
        elif word == "ARRAY":
            kind = ListType(NO_ID, self.type(depth + 1), element_required=False)
        else:
            key = self.type(depth + 1)
            self._expect(",")
            kind = MapType(NO_ID, key, NO_ID, self.type(depth + 1), value_required=False)
        self._expect(">")
        return kind

    def _field(self, depth: int) -> NestedField:
        self._column = name = self._name()
        self._take(":")
        kind = self.type(depth)
        required, doc = False, None
        while True:
            if not required and self._take("NOT"):
                self._expect("NULL")
                required = True
            elif doc is None and self._take("COMMENT"):
                doc = self._string()
            else:
                return NestedField(NO_ID, name, kind, required=required, doc=doc)

    def _decimal(self) -> DecimalType:
        at = self._at
        numbers = self._numbers(2)
        precision = numbers[0] if numbers else DEFAULT_PRECISION
        scale = numbers[1] if len(numbers) == 2 else DEFAULT_SCALE
        if not 1 <= precision <= 38 or scale > precision:
            self._at = at
            self._refuse(f"there is no decimal({precision}, {scale})", "A decimal has 1 to 38 digits")
        return DecimalType(precision, scale)

    def _numbers(self, most: int) -> list[int]:
        """Up to so many numbers in brackets, or nothing at all."""
        if not self._take("("):
            return []
        numbers = [self._number()]
        while len(numbers) < most and self._take(","):
            numbers.append(self._number())
        self._expect(")")
        return numbers

    def _number(self) -> int:
        token = self._next("a number")
        if token.token_type != TokenType.NUMBER or not re.fullmatch(r"[0-9]{1,9}", token.text):
            self._at -= 1
            self._refuse(f"expected a number, found {self._found()}")
        return int(token.text)

    def _name(self) -> str:
        token = self._next("the name of a column")
        is_word = not _is_quoted(token) and token.token_type != TokenType.NUMBER and _WORD.fullmatch(token.text)
        if token.token_type != TokenType.IDENTIFIER and not is_word:
            self._at -= 1
            self._refuse(f"expected the name of a column, found {self._found()}", "Quote other names: `the name`")
        return str(token.text)

    def _string(self) -> str:
        token = self._next("a text in quotes")
        if token.token_type != TokenType.STRING:
            self._at -= 1
            self._refuse(f"expected a text in quotes, found {self._found()}")
        return str(token.text)

    def _take(self, word: str) -> bool:
        """Go past this word or sign if it comes next."""
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            if not _is_quoted(token) and token.text.upper() == word:
                self._at += 1
                return True
        return False

    def _expect(self, word: str) -> None:
        if not self._take(word):
            self._refuse(f"expected {word!r}, found {self._found()}")

    def _next(self, wanted: str) -> Token:
        if self._at == len(self._tokens):
            self._refuse(f"expected {wanted}, found {self._found()}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _found(self) -> str:
        return shown(self._tokens[self._at].text) if self._at < len(self._tokens) else "the end"

    def _refuse(self, what: str, remedy: str = "") -> NoReturn:
        at_end = self._at == len(self._tokens)
        start = len(self._text) if at_end else self._tokens[self._at].start - 1
        line = self._text.count("\n", 0, start) + 1
        character = start - self._text.rfind("\n", 0, start)
        raise InvalidSchema(what, on=f"schema text, line {line}, character {character}", remedy=remedy)


def _is_quoted(token: Token) -> bool:
    return token.token_type in (TokenType.IDENTIFIER, TokenType.STRING)
