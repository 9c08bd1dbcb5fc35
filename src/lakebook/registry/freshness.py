"""Freshness of views: the commit that changes a source marks the ranges it concerns, in its own transaction.

A range of a view becomes stale when one of its sources gets or loses rows of its time by a change of rows, and
frozen when retention, or the end of the source, takes rows of its time away. A change that moves rows to other
files concerns nobody.

Claims are marked before ranges, and whoever enters a range locks its claim first. So a commit in flight either finds
the claim, or waits for the range that takes its place and then finds that. A claim is taken under the locks of its
sources: what was committed before is read by the build, and what comes later finds the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.statements import Statement, bind
from lakebook.registry.transactions import Reader, Transaction

TOPIC, TABLE = "topic", "table"
#: No range is wider: a day, in milliseconds.
WIDEST = 86_400_000
#: All of time.
ALWAYS = (-(2**62), 2**62)

#: Times between which a change has rows, both included, in milliseconds.
Span = tuple[int, int]

_v = schema.views.c
_s = schema.view_sources.c
_c = schema.view_claims.c
_r = schema.lakehouse_partitions.c

VIEWS_OF_SOURCE = Statement(
    sa.select(_s.view_id, _v.name, _s.field_id)
    .select_from(schema.view_sources.join(schema.views, _v.id == _s.view_id))
    .where(_s.kind == bind("of_kind"), _s.source_id == bind("of_source"))
    .order_by(_s.view_id),
    "of_kind",
    "of_source",
)


def _claims(column: sa.Column[bool]) -> Statement:
    return Statement(
        sa.update(schema.view_claims)
        .where(
            _c.view_id == bind("of_view"),
            _c.begin_time <= bind("most"),
            _c.end_time > bind("least"),
            # One that is marked has all it needs: who commits does not wait for it again.
            column.is_(sa.false()),
        )
        .values({column.name: sa.true()}),
        "of_view",
        "least",
        "most",
    )


def _ranges(column: sa.Column[int]) -> Statement:
    met = (
        sa.select(_r.id)
        .where(
            _r.view_set_name == bind("of_view"),
            # No range is wider, so that an index finds all that can meet.
            _r.begin_insert_time > bind("least") - sa.literal_column(str(WIDEST), sa.BigInteger),
            _r.begin_insert_time <= bind("most"),
            _r.end_insert_time > bind("least"),
            column.is_(None),
        )
        # In one order, so that nobody waits in a circle.
        .order_by(_r.id)
        .with_for_update()
    )
    return Statement(
        sa.update(schema.lakehouse_partitions).where(_r.id.in_(met)).values({column.name: bind("now")}),
        "now",
        "of_view",
        "least",
        "most",
    )


_STALE = (_claims(schema.view_claims.c.dirty), _ranges(schema.lakehouse_partitions.c.stale_at))
_FROZEN = (_claims(schema.view_claims.c.frozen), _ranges(schema.lakehouse_partitions.c.frozen_at))


def has_views(reader: Reader, kind: str, source_id: int) -> bool:
    """Whether any view reads a source."""
    return reader.one(VIEWS_OF_SOURCE, kind, source_id) is not None


def mark_stale(
    transaction: Transaction,
    kind: str,
    source_id: int,
    spans_of: Callable[[int | None], Iterable[Span]],
    *,
    gone: bool = False,
) -> None:
    """Mark what a change of a source concerns as stale or, if its rows are just gone, as frozen.

    `spans_of` is asked, only if there is a view, for the times of the rows by the field id of their event time.
    """
    found = transaction.all(VIEWS_OF_SOURCE, kind, source_id)
    if not found:
        return
    claims, ranges = _FROZEN if gone else _STALE
    now = transaction.clock.now_ms()
    spans = {field_id: merged(spans_of(field_id)) for field_id in dict.fromkeys(row[2] for row in found)}
    for view_id, _, field_id in found:
        for least, most in spans[field_id]:
            transaction.run(claims, view_id, least, most)
    # After all claims: see above.
    for _, name, field_id in found:
        for least, most in spans[field_id]:
            transaction.run(ranges, now, name, least, most)


def mark_all_stale(transaction: Transaction, view_id: int, name: str) -> None:
    """Mark all that is built of a view, and all that is being built, as stale."""
    claims, ranges = _STALE
    transaction.run(claims, view_id, *ALWAYS)
    transaction.run(ranges, transaction.clock.now_ms(), name, *ALWAYS)


def freeze_all(transaction: Transaction, kind: str, source_id: int) -> None:
    """Freeze all that was built of a source that is no more."""
    mark_stale(transaction, kind, source_id, lambda _: [ALWAYS], gone=True)


def merged(spans: Iterable[Span]) -> Sequence[Span]:
    """The same times with as few spans as can be, in order."""
    found: list[Span] = []
    for least, most in sorted(spans):
        if found and least <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], most))
        else:
            found.append((least, most))
    return found


_SIGN = 2**63


def span_of(lower: bytes | None, upper: bytes | None, rows: int | None, nulls: int | None) -> Span | None:
    """The times that the bounds of a column of timestamps stand for; none if it has nothing but nulls."""
    if rows is not None and rows == nulls:
        return None
    if lower is None or upper is None:
        return ALWAYS
    return milliseconds_of(lower), milliseconds_of(upper)


def milliseconds_of(bound: bytes) -> int:
    """The time that a stored bound of timestamps stands for."""
    # Bounds keep the order of values: microseconds with their sign turned round.
    return (int.from_bytes(bound, "big") - _SIGN) // 1000
