"""Times of which a source has lost rows for ever: a range of a view that has them can not be built whole any more.

Retention says it of a topic, partition by partition, whether or not a view reads the topic yet. Of the table of a view
it is said when ranges are retired, for the columns that are the event time of another view. Times are kept as whole
minutes, for no range is finer, and what touches is put together: so few rows tell of very many segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.freshness import TABLE, TOPIC, Span, merged
from lakebook.registry.statements import Statement, bind, insert_into
from lakebook.registry.transactions import Reader, Transaction

#: From one time to another, which is no part of it, in milliseconds.
Lost = tuple[int, int]

#: No range is finer, in milliseconds.
MINUTE = 60_000

_l = schema.source_losses.c
_s = schema.view_sources.c
_t = schema.tables.c
_part = (_l.kind == bind("of_kind"), _l.source_id == bind("of_source"), _l.part == bind("of_part", sa.Integer))

TOUCHING = Statement(
    sa.select(_l.begin_time, _l.end_time).where(*_part, _l.begin_time <= bind("end"), _l.end_time >= bind("begin")),
    "of_kind",
    "of_source",
    "of_part",
    "begin",
    "end",
)
DELETE_TOUCHING = Statement(
    sa.delete(schema.source_losses).where(*_part, _l.begin_time <= bind("end"), _l.end_time >= bind("begin")),
    "of_kind",
    "of_source",
    "of_part",
    "begin",
    "end",
)
INSERT_LOSS = insert_into(schema.source_losses)
FORGET_LOSSES = Statement(
    sa.delete(schema.source_losses).where(_l.kind == bind("of_kind"), _l.source_id == bind("of_source")),
    "of_kind",
    "of_source",
)
_topic = sa.literal_column(f"'{TOPIC}'", sa.Text)
_table = sa.literal_column(f"'{TABLE}'", sa.Text)
_meeting = (_s.view_id == bind("of_view"), _l.begin_time < bind("end"), _l.end_time > bind("begin"))
LOSSES_OF = Statement(
    sa.union_all(
        sa.select(_l.begin_time, _l.end_time)
        .select_from(
            schema.view_sources.join(schema.source_losses, sa.and_(_l.kind == _s.kind, _l.source_id == _s.source_id))
        )
        .where(*_meeting, sa.or_(_s.kind == _topic, _l.part == _s.field_id)),
        # What a topic has lost, the table that is made of its segments loses too.
        sa.select(_l.begin_time, _l.end_time)
        .select_from(
            schema.view_sources.join(schema.tables, sa.and_(_s.kind == _table, _t.id == _s.source_id)).join(
                schema.source_losses, sa.and_(_l.kind == _topic, _l.source_id == _t.topic_id)
            )
        )
        .where(*_meeting),
    ),
    "of_view",
    "begin",
    "end",
)


def note_losses(transaction: Transaction, kind: str, source_id: int, part: int, spans: Iterable[Span]) -> None:
    """Remember that rows of these times are gone. The transaction holds the lock of the partition or the table."""
    for least, most in merged(_whole_minutes(spans)):
        begin, end = least, most + 1
        given = (kind, source_id, part, begin, end)
        found = transaction.all(TOUCHING, *given)
        if found:
            transaction.run(DELETE_TOUCHING, *given)
        begin, end = min([begin, *(row[0] for row in found)]), max([end, *(row[1] for row in found)])
        transaction.insert_many(INSERT_LOSS, [(kind, source_id, part, begin, end)])


def _whole_minutes(spans: Iterable[Span]) -> Iterable[Span]:
    return ((least // MINUTE * MINUTE, (most // MINUTE + 1) * MINUTE - 1) for least, most in spans)


def forget_losses(transaction: Transaction, kind: str, source_id: int) -> None:
    """Forget what a source has lost that is no more itself."""
    transaction.run(FORGET_LOSSES, kind, source_id)


def losses_between(reader: Reader, view_id: int, begin: int, end: int) -> tuple[Lost, ...]:
    """The times between two of which some source of a view has lost rows, in order and apart from each other."""
    rows = reader.all(LOSSES_OF, view_id, begin, end)
    return tuple((least, most + 1) for least, most in merged((row[0], row[1] - 1) for row in rows))


def is_lost(losses: Sequence[Lost], begin: int, end: int) -> bool:
    """Whether a range meets any of these times."""
    before = bisect_left(losses, (end,))
    return before > 0 and losses[before - 1][1] > begin
