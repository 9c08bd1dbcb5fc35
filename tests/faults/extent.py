"""How far the tests go: all the way (`make soak`), or as far as fits into a small run.

Small runs try each case of the fault tests, and of migrations, on one of the databases by turns (where there is but one
database, with one kind of warehouse), and each case of the acceptance tests in one of the shapes; so they do with tests
that have but one case, in the order of their file. Tests that are long (`long`) they have at the place that is named.
They try nothing in memory that they try on SQLite in a file, and of cases that are crossed with others (`crossed`) each
one once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from books import MEMORY, POSTGRESQL, SQLITE
from buckets import BUCKET, FOLDER
from shapes import EMBEDDED, SCALED

#: Whether each of them goes all the way: every case on every database, every fault.
EVERYWHERE = os.environ.get("LAKEBOOK_TEST_EVERYWHERE", "no") == "yes"
_TESTS = Path(__file__).parents[1]
#: What takes turns, by the folder or the file of the tests. Hostile input is refused before a database hears of it.
_TWINS = {
    _TESTS / "registry" / "test_hostile_commits.py": (SQLITE, POSTGRESQL),
    _TESTS / "registry" / "test_bad_input.py": (SQLITE, POSTGRESQL),
    _TESTS / "registry" / "test_rebuild_failures.py": (SQLITE, POSTGRESQL),
    _TESTS / "registry" / "test_rebuild_outside.py": (SQLITE, POSTGRESQL),
    _TESTS / "spark" / "test_mixed_spark.py": (SQLITE, POSTGRESQL),
    **{
        _TESTS / "faults" / f"test_{name}.py": (FOLDER, BUCKET)
        for name in ("lost_commits", "postgres_failover", "postgres_outages", "two_daemons")
    },
    _TESTS / "faults": (SQLITE, POSTGRESQL),
    _TESTS / "migrations": (SQLITE, POSTGRESQL),
    _TESTS / "spark" / "test_connect.py": (FOLDER, BUCKET),
    _TESTS / "acceptance": (EMBEDDED, SCALED),
}

#: For a test that takes long: small runs have it at the place that it names only, or not at all if it names none.
long = pytest.mark.long


def crossed(many: Sequence[Any], few: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each of many with each of few; in a small run with one of them, by turns."""
    if EVERYWHERE:
        return list(product(many, few))
    # Places take turns with every case, and these with every second: else one would always meet the same.
    return [(item, few[number // 2 % len(few)]) for number, item in enumerate(many)]


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """What is not tried in this run."""
    return set() if EVERYWHERE else _by_turns(items) | _in_memory(items)


def _in_memory(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those that are tried in a file as well."""
    there = {item.nodeid for item in items}
    return {
        item
        for item in items
        if f"[{MEMORY}" in item.nodeid and item.nodeid.replace(f"[{MEMORY}", f"[{SQLITE}", 1) in there
    }


def _by_turns(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those whose twin is run: the first case of a test at the one place, the second at the other."""
    cases: dict[tuple[str, str], dict[tuple[str, ...], dict[str, pytest.Item]]] = {}
    elsewhere: set[pytest.Item] = set()
    for item in items:
        mark = item.get_closest_marker("long")
        if mark is not None and not mark.args:
            elsewhere.add(item)
            continue
        twins, params = _TWINS.get(item.path, _TWINS.get(item.path.parent)), getattr(item, "callspec", None)
        if twins is None or params is None or not isinstance(item, pytest.Function):
            continue
        values = dict(params.params)
        place = next((value for value in values.values() if value in twins), None)
        others = tuple(f"{name}={value!r}" for name, value in sorted(values.items()) if value != place)
        if place is None:
            continue
        if mark is not None:
            if place not in mark.args:
                elsewhere.add(item)
            continue
        # The cases of a test take turns; and so do the tests of a file that have but one.
        of_what, case = (item.originalname, others) if others else ("", (item.originalname,))
        cases.setdefault((str(item.path), of_what), {}).setdefault(case, {})[place] = item
    return elsewhere | {
        list(found.values())[(number + 1) % 2]
        for of_test in cases.values()
        for number, found in enumerate(found for found in of_test.values() if len(found) == 2)
    }
