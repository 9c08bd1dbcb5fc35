"""The bench: that it measures what it says, at a size that takes a moment."""

from __future__ import annotations

from pathlib import Path

from bench import moving, scale, streams
from bench.asked import Asked
from bench.measure import Effort
from bench.places import Ground

from extent import long
from lakebook.registry.statements import POSTGRESQL, SQLITE


def say(what: str, done: int = 0, total: int | None = None) -> None:
    """Nobody watches."""


@long
def test_the_bench_of_streams_measures_every_way_in_and_out_beside_a_peer(tmp_path: Path) -> None:
    # Spark is measured on the first of the databases only, which is not this one.
    kinds, effort = (POSTGRESQL, SQLITE), Effort(rounds=1, seconds=0.001, singles=5)
    asked = Asked(kinds, ["streams"], True, effort, [], 0, [], [], 0, [], records=2_000, among=200)
    ground = Ground(SQLITE, tmp_path)
    found = list(streams.measure(ground, asked, say))
    assert all(result.ratio is not None and result.ratio > 0 for result in found)
    assert all(result.database == SQLITE for result in found)
    names = " ".join(result.name for result in found)
    for way in ("send", "send_many", "send_table", "poll", "iterating", "poll_batches", "acknowledgement"):
        assert way in names
    assert {result.size for result in found if "reading one record" in result.name} == {200}


@long
def test_the_bench_of_scale_measures_the_growth_of_each_kind_of_work(tmp_path: Path) -> None:
    effort = Effort(rounds=1, seconds=0.001, singles=5)
    asked = Asked(
        [SQLITE], ["scale"], True, effort, [], 0, [], [], 0, [], 0, 0, grown=[600, 1_200], grown_tables=[10, 20]
    )
    found = list(scale.measure(Ground(SQLITE, tmp_path), asked, say))
    assert {result.size for result in found} == {1_200, 20}
    for work in ("plan", "page of files", "page of events", "page of tables", "find", "commit", "publication"):
        assert any(work in result.name and result.ratio for result in found)
    memory = [result.ours for result in found if "memory" in result.name]
    assert memory
    assert all(grown is not None and grown > 0 for grown in memory)


def test_the_bench_of_moving_measures_a_checkpoint_a_copy_and_a_rebuild(tmp_path: Path) -> None:
    effort = Effort(rounds=1, seconds=0.001, singles=5)
    asked = Asked([SQLITE], ["moving"], True, effort, [], 0, [], [], 0, [], 0, 0, moved=[40])
    found = list(moving.measure(Ground(SQLITE, tmp_path), asked, say))
    assert {result.size for result in found} == {40}
    assert all(result.ours is not None and result.ours > 0 for result in found)
    for work in ("checkpoint", "copy", "rebuild"):
        assert any(result.name.startswith((work, f"a {work}")) for result in found)
    assert sum(result.ratio is not None for result in found) == 2
