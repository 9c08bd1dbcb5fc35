"""What is accepted is accepted in both shapes: a book in a folder, and one on PostgreSQL, a bucket and a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shapes import EMBEDDED, SCALED, Embedded, Scaled, Shape


@pytest.fixture(scope="module", params=[EMBEDDED, SCALED])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shape]:
    folder = tmp_path_factory.mktemp("filled")
    made: Shape = Embedded(folder)
    if request.param == SCALED:
        made = Scaled(folder, request.getfixturevalue("postgres"), request.getfixturevalue("buckets"))
    yield made
    made.end()
