"""Hot look-ups walk an index; none reads a table from end to end."""

from __future__ import annotations

from bench.plans import plans, unindexed

from books import Place, describe
from lakebook.registry.statements import POSTGRESQL


def test_hot_statements_use_their_indexes(shared_place: Place) -> None:
    book = shared_place.open()
    book.metadata.create_topic("orders")
    book.metadata.add_segments([describe(base=base, count=1) for base in range(2000)])
    book.metadata.commit_offset("g", "orders", 0, 5)
    if shared_place.kind == POSTGRESQL:
        with book._registry.read() as reader:
            reader._connection.execute("ANALYZE")
    # On so small a book PostgreSQL would rightly prefer to read it whole.
    found = plans(book, only_indexes=shared_place.kind == POSTGRESQL)
    assert len(found) >= 7
    assert unindexed(found) == []
