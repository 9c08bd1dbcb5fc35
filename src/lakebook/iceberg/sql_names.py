"""What a query reads, and the same query over other names: found in its text, which stays as it is otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlglot
from sqlglot import exp

from lakebook.errors import InvalidInput
from lakebook.names import MAX_TEXT, shown

#: The one parameter that a view's query may use.
INSTANCE = "instance"
_DIALECT = "spark"
_COMPARISONS: Mapping[Any, str] = {exp.EQ: "=", exp.GT: ">", exp.GTE: ">=", exp.LT: "<", exp.LTE: "<="}
_TURNED = {"=": "=", ">": "<", ">=": "<=", "<": ">", "<=": ">="}
#: Of a SELECT that is nothing but its columns and what they are from.
_BARE = {"expressions", "from", "from_", "kind", "hint"}


@dataclass(frozen=True)
class Place:
    """Where a query names something it reads."""

    name: str
    start: int
    end: int
    #: Its name without what stands before it, and what else the query calls it.
    last: str
    alias: str | None


@dataclass(frozen=True)
class Comparison:
    """A column compared with a value, which every row of the result meets."""

    column: str
    operator: str
    value: str
    is_text: bool
    #: The type of time that the query makes of the value: "date" or "timestamp"; none if it takes it as it is.
    cast: str | None = None

    @property
    def text(self) -> str:
        """As a condition of a table's plan."""
        column = self.column.replace('"', '""')
        value = "'" + self.value.replace("'", "''") + "'" if self.is_text else self.value
        return f'"{column}" {self.operator} {value}'


@dataclass(frozen=True)
class Query:
    """A query, and what its text says about it."""

    text: str
    places: tuple[Place, ...]
    #: The names of parameters.
    parameters: frozenset[str]
    #: Whether it is `SELECT count(*)` of one thing and nothing else.
    is_count: bool
    #: What a query that names one thing, in one place, asks of its columns.
    comparisons: tuple[Comparison, ...]
    #: Whether it surely has no rows where what it reads has none.
    is_empty_of_nothing: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that it reads, once."""
        return tuple(dict.fromkeys(place.name for place in self.places))

    def over(self, names: Mapping[str, str]) -> str:
        """The same query, reading others; each goes by the name it had."""
        parts, position = [], 0
        for place in sorted(self.places, key=lambda item: item.start):
            known_as = "" if place.alias is not None else f" AS {_quoted(place.last)}"
            parts += [self.text[position : place.start], _quoted(names[place.name]), known_as]
            position = place.end
        return "".join([*parts, self.text[position:]])


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def parse_query(text: object) -> Query:
    """A query from its text: one SELECT, in Spark's words."""
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_TEXT or "\0" in text:
        raise InvalidInput(f"{shown(text)} is not a query", on="SQL", remedy="Write one SELECT")
    try:
        trees = [tree for tree in sqlglot.parse(text, read=_DIALECT) if tree is not None]
    except Exception as error:  # noqa: BLE001 - the parser's own faults, too, say that it cannot be read
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInput(f"the query cannot be read ({reason[:200]})", on="SQL", remedy="Write one SELECT") from None
    if len(trees) != 1 or not isinstance(trees[0], exp.Query):
        raise InvalidInput("it is not one SELECT", on="SQL", remedy="Write one SELECT")
    tree = trees[0]
    places = tuple(_place(table) for table in tree.find_all(exp.Table) if not _is_local(table))
    if not places:
        raise InvalidInput("the query reads nothing", on="SQL", remedy="Name a topic, a table or a view in FROM")
    parameters = frozenset(str(item.this) for item in tree.find_all(exp.Placeholder) if item.this)
    # Of what a subquery reads, the conditions around it say nothing.
    comparisons = _comparisons(tree) if len(places) == 1 else ()
    return Query(text.rstrip().rstrip(";"), places, parameters, _is_count(tree), comparisons, _is_empty(tree))


def _place(table: exp.Table) -> Place:
    parts = table.parts
    if not parts or not all(isinstance(part, exp.Identifier) and "start" in part.meta for part in parts):
        raise InvalidInput(
            f"{shown(table.sql(_DIALECT))} is no topic, table or view", on="SQL", remedy="Name what the query reads"
        )
    name = ".".join(part.name for part in parts)
    return Place(name, parts[0].meta["start"], parts[-1].meta["end"] + 1, parts[-1].name, table.alias or None)


def _is_local(table: exp.Table) -> bool:
    """Whether a name is that of a part of the query itself, from where it stands."""
    if len(table.parts) != 1:
        return False
    below: Any = table
    above: Any = table.parent
    inside: exp.CTE | None = None
    while above is not None:
        if isinstance(below, exp.CTE):
            inside = below
        with_ = above if isinstance(above, exp.With) else above.args.get("with_") or above.args.get("with")
        if isinstance(with_, exp.With):
            visible = with_.expressions
            if inside in visible and not with_.args.get("recursive"):
                visible = visible[: visible.index(inside)]
            if any(item.alias.lower() == table.name.lower() for item in visible):
                return True
        below, above = above, above.parent
    return False


def _is_count(tree: exp.Query) -> bool:
    if not isinstance(tree, exp.Select) or {name for name, value in tree.args.items() if value} - _BARE:
        return False
    columns = [item.this if isinstance(item, exp.Alias) else item for item in tree.expressions]
    return (
        len(columns) == 1
        and isinstance(columns[0], exp.Count)
        and isinstance(columns[0].this, exp.Star)
        and not columns[0].expressions
        and _only_source(tree) is not None
    )


def _is_empty(tree: exp.Query) -> bool:
    """Whether it is a plain SELECT of one thing whose rows come from rows: no total over nothing."""
    if not isinstance(tree, exp.Select) or _only_source(tree) is None or tree.find(exp.Subquery, exp.With) is not None:
        return False
    group = tree.args.get("group")
    if group is None:
        return tree.find(exp.AggFunc, exp.Any, exp.Anonymous) is None and not tree.args.get("having")
    # Of grouping sets, one may be of everything, as the group by nothing is.
    sets = {name for name, value in group.args.items() if value} - {"expressions"}
    return bool(group.expressions) and not sets and not any(isinstance(item, exp.Tuple) for item in group.expressions)


def _only_source(tree: exp.Select) -> exp.Table | None:
    source = tree.args.get("from_") or tree.args.get("from")
    table = source.this if source is not None else None
    plain = isinstance(table, exp.Table) and not ({name for name, value in table.args.items() if value} - _TABLE)
    return table if plain and not tree.args.get("joins") and not tree.args.get("laterals") else None


_TABLE = {"this", "db", "catalog", "alias"}


def _comparisons(tree: exp.Query) -> tuple[Comparison, ...]:
    if not isinstance(tree, exp.Select) or tree.find(exp.CTE) is not None:
        return ()
    table, where = _only_source(tree), tree.args.get("where")
    if table is None or where is None:
        return ()
    found = []
    for test in where.this.flatten() if isinstance(where.this, exp.And) else [where.this]:
        operator = _COMPARISONS.get(type(test))
        if operator is None:
            continue
        left, right = test.this, test.expression
        if not isinstance(left, exp.Column):
            left, right, operator = right, left, _TURNED[operator]
        value = _value(right)
        if isinstance(left, exp.Column) and value is not None and left.table in ("", table.alias_or_name):
            found.append(Comparison(left.name, operator, *value))
    return tuple(found)


def _value(expression: Any) -> tuple[str, bool, str | None] | None:
    """A value as it is written, whether it is text, and what the query makes of it."""
    cast = None
    if isinstance(expression, exp.Cast) and expression.is_type("timestamp", "timestamptz", "date"):
        cast = "date" if expression.is_type("date") else "timestamp"
        expression = expression.this
        if not (isinstance(expression, exp.Literal) and expression.is_string):
            return None
    if isinstance(expression, exp.Neg) and isinstance(expression.this, exp.Literal) and not expression.this.is_string:
        return f"-{expression.this.name}", False, None
    return (expression.name, bool(expression.is_string), cast) if isinstance(expression, exp.Literal) else None
