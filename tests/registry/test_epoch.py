"""A book's epoch: writers of a former life are refused, subscribers start anew."""

from __future__ import annotations

import pytest

from books import Place, describe
from lakebook.errors import CursorExpired, EpochChanged


def test_writers_of_a_former_life_are_refused(shared_place: Place) -> None:
    former, restorer = shared_place.open(), shared_place.open()
    former.metadata.create_topic("orders")
    turn = former.metadata.claim_append("orders", 0)
    cursor = former.events.now()
    former.events.save_cursor("updater", cursor)
    epoch = restorer.begin_epoch()
    assert epoch == restorer.identity.epoch != former.identity.epoch
    for write in (
        lambda: former.metadata.create_topic("clicks"),
        lambda: former.metadata.add_segment(describe()),
        lambda: former.metadata.append_segment(turn, describe()),
        lambda: former.metadata.commit_offset("g", "orders", 0, 0),
    ):
        with pytest.raises(EpochChanged):
            write()
    for book in (restorer, former):
        with pytest.raises(CursorExpired):
            book.events.read(cursor)
    assert former.events.now().epoch == epoch
    assert restorer.events.load_cursor("updater") is None
    assert restorer.events.read(restorer.events.beginning()).events == ()
    restorer.metadata.add_segment(describe())
    assert shared_place.open().identity.epoch == epoch
    assert restorer.verify().ok


def test_a_commit_that_was_open_can_never_take_effect_in_a_new_life(shared_place: Place) -> None:
    former, restorer = shared_place.open(), shared_place.open()
    former.metadata.create_topic("orders")
    former.metadata.claim_append("orders", 0)
    assert restorer.measure().values()["lakebook_open_commits"] == 1
    restorer.begin_epoch()
    assert restorer.measure().values()["lakebook_open_commits"] == 0
