"""What a segment says of itself in its key-value metadata, beside its place: which batches of sinks are in it.

    lakebook.batch              which attempt to land a batch it is a part of
    lakebook.batch_records      the records of all parts
    lakebook.sinks              the last batch of each sink that has records in it

Segments that were written before these were have none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from lakebook.errors import InvalidSegment
from lakebook.names import check_text, decimal_in

#: The beginning of the names of all facts.
PREFIX = "lakebook."
_ATTEMPT, _RECORDS, _SINKS = "batch", "batch_records", "sinks"


def facts_of(opened: Any) -> dict[str, str]:
    """The facts in a footer that was opened, by their names."""
    told = {key.decode(): value.decode() for key, value in (opened.metadata or {}).items() if key != b"ARROW:schema"}
    return {key.removeprefix(PREFIX): value for key, value in told.items() if key.startswith(PREFIX)}


def batch_facts(attempt: str, records: int, sink: str | None, batch_id: int | None) -> dict[str, Any]:
    """What every segment of an attempt to land a batch says."""
    sinks = {} if sink is None or batch_id is None else {sink: batch_id}
    return {_ATTEMPT: attempt, _RECORDS: records, **sinks_facts(sinks)}


def sinks_facts(sinks: Mapping[str, int]) -> dict[str, Any]:
    """What a segment says of the sinks whose records it has."""
    return {_SINKS: orjson.dumps(dict(sorted(sinks.items()))).decode()} if sinks else {}


def attempt_in(facts: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """The attempt that a segment is a part of, and the records of all parts."""
    attempt = facts.get(_ATTEMPT)
    if attempt is None:
        return None, None
    records = decimal_in(facts.get(_RECORDS))
    if records is None:
        raise InvalidSegment("it does not say how many records its batch has")
    return str(attempt), records


def sinks_in(facts: Mapping[str, Any]) -> dict[str, int]:
    """The last batches of the sinks whose records a segment has."""
    told = facts.get(_SINKS)
    if told is None:
        return {}
    try:
        found = orjson.loads(told)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(_is_batch(number) for number in found.values()):
        raise InvalidSegment("what it says of the batches of sinks cannot be")
    for sink in found:
        check_text("sink", sink)
    return found


def _is_batch(number: object) -> bool:
    # As the registry holds it; whoever writes JSON can write any number.
    return isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**63


def newest_of(told: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The last batch of each sink, by what several segments say."""
    found: dict[str, int] = {}
    for sinks in told:
        for sink, number in sinks.items():
            found[sink] = max(number, found.get(sink, number))
    return found
