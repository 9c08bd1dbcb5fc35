"""One consumer as a member of its group: it says that it lives, and hears what it is to read.

A thread of its own says so three times in the group's session time, and hears of every change. What follows
from a change is done by the thread that polls. A member that has not polled for `poll_seconds` leaves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from lakebook.errors import BookClosed, LakebookError, MemberRemoved
from lakebook.lake.lake import Lake
from lakebook.registry.members import Membership, removed
from lakebook.streams.metadata_store import MetadataStore

LOG = logging.getLogger("lakebook.consumer")


class Member:
    """A member of a group. `tell` is called when there is something to be done by who polls."""

    def __init__(
        self, lake: Lake, metadata: MetadataStore, group: str, topics: Sequence[str], tell: Callable[[], None]
    ) -> None:
        self._clock = lake.clock
        self._session = lake.settings.group_session
        self._poll_seconds = lake.settings.poll_seconds
        self._metadata = metadata
        self.group = group
        self._topics = list(topics)
        self._tell = tell
        # Held by who asks the registry, so that answers are taken in the order in which they were given.
        self._asking = threading.RLock()
        self._state: Membership | None = None
        self._id = ""
        self._heard = self._polled = self._clock.monotonic()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        #: Whether something has changed since `follow` was called last.
        self.changed = True

    @property
    def is_due(self) -> bool:
        """Whether there is something to follow: news, or a silence in which its partitions may have passed on."""
        return self.changed or self._clock.monotonic() - self._heard >= self._session

    @property
    def id(self) -> str:
        """The id it has, or had last."""
        return self._id

    @property
    def generation(self) -> int:
        """The generation that its commits carry."""
        return self._current().generation

    def _current(self) -> Membership:
        state = self._state
        if state is None:
            raise removed(self.group, self._id or "that has not polled")
        return state

    def note_poll(self) -> None:
        """Remember that somebody reads."""
        self._polled = self._clock.monotonic()

    def follow(self) -> Membership:
        """What it is to read now; the registry is asked if it may have given its partitions away meanwhile.

        It joins if it is no member. `MemberRemoved`: it was one, and is none any more.
        """
        self.changed = False
        with self._asking:
            state = self._state
            if state is None:
                return self._join()
            if self._clock.monotonic() - self._heard >= self._session:
                return self.sync()
            return state

    def _join(self) -> Membership:
        self._ending.set()
        asked = self._clock.monotonic()
        state = self._metadata.join_group(self.group, self._topics)
        self._state, self._id, self._heard = state, state.member_id, asked
        self._ending = threading.Event()
        thread = threading.Thread(target=self._run, args=(self._ending,), name="lakebook-membership", daemon=True)
        # The former one ends by itself; it may just wait for the lock that is held here.
        self._threads = [former for former in self._threads if former.is_alive()] + [thread]
        thread.start()
        return state

    def sync(self, released: Iterable[tuple[str, int]] = ()) -> Membership:
        """Say that it lives and what it has released; what it is to read."""
        with self._asking:
            former = self._current()
            asked = self._clock.monotonic()
            try:
                state = self._metadata.sync_group(self.group, former.member_id, released=tuple(released))
            except MemberRemoved:
                self._state, self.changed = None, True
                raise
            self._state, self._heard = state, asked
            if (state.partitions, state.releasing) != (former.partitions, former.releasing):
                self.changed = True
            return state

    def leave(self) -> None:
        """Be a member no more. If the registry does not answer, its time runs out by itself."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._leave()

    def _leave(self) -> None:
        with self._asking:
            state, self._state = self._state, None
            if state is not None:
                with suppress(LakebookError):
                    self._metadata.leave_group(self.group, state.member_id)

    def _run(self, ending: threading.Event) -> None:
        while not ending.wait(self._session / 3):
            if self._clock.monotonic() - self._polled >= self._poll_seconds:
                LOG.warning(
                    "group %s: the member %s leaves, for it has not polled for %s s",
                    self.group,
                    self._id,
                    self._poll_seconds,
                )
                self._leave()
                self.changed = True
                return
            try:
                self.sync()
            except (MemberRemoved, BookClosed):
                self._tell()
                return
            except LakebookError as error:
                # Tried again in a while. If that takes too long, others remove this member, and it hears of that.
                LOG.warning("group %s: the registry has not heard of the member %s (%s)", self.group, self._id, error)
                continue
            if self.changed:
                self._tell()
