"""Names of tables and of lake objects, for people: the registry goes by ids."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.statements import POSTGRESQL, SQLITE, Statement, among
from lakebook.registry.transactions import Reader

_n = schema.namespaces.c
_t = schema.tables.c
_o = schema.topics.c
_p = schema.partitions.c
_g = schema.consumer_groups.c
_tables = schema.tables.join(schema.namespaces, _n.id == _t.namespace_id)
_partitions = schema.partitions.join(schema.topics, _o.id == _p.topic_id)


def _named(key: sa.ColumnElement[int], source: sa.FromClause, *columns: sa.ColumnElement[object]) -> Statement:
    clauses = [
        sa.select(key, *columns).select_from(source).where(among(key, "of_ids", database))
        for database in (SQLITE, POSTGRESQL)
    ]
    return Statement(clauses[0], "of_ids", postgresql=clauses[1])


TABLE_NAMES = _named(_t.id, _tables, _n.name, _t.name)
# By kind: what a name consists of, and what stands between its parts.
NAMES_OF_KIND = {
    "table": (_named(_t.object_id, _tables, _n.name, _t.name), "."),
    "topic": (_named(_o.object_id, schema.topics, _o.name), ""),
    "partition": (_named(_p.object_id, _partitions, _o.name, _p.partition_id), "/"),
    "group": (_named(_g.object_id, schema.consumer_groups, _g.group_id), ""),
}


def names_of_tables(reader: Reader, table_ids: Iterable[int | None]) -> dict[int, str]:
    """The names of tables by their ids, with their namespaces; of those that are gone altogether, none."""
    wanted = sorted({table_id for table_id in table_ids if table_id is not None})
    rows = reader.all(TABLE_NAMES, reader.listed(wanted)) if wanted else []
    return {table_id: f"{namespace}.{name}" for table_id, namespace, name in rows}


def names_of_objects(reader: Reader, object_ids: Iterable[int]) -> dict[int, str]:
    """What lake objects are called, with their kinds; those that are gone altogether by their numbers."""
    wanted = sorted(set(object_ids))
    found = {object_id: f"object {object_id}" for object_id in wanted}
    if wanted:
        for kind, (statement, between) in NAMES_OF_KIND.items():
            for object_id, *parts in reader.all(statement, reader.listed(wanted)):
                found[object_id] = f"{kind} {between.join(map(str, parts))}"
    return found
