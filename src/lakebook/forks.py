"""What has to be made anew in a child process after a fork: locks that a thread may have held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that cannot be used in a child as the parent left it."""

    def after_fork_in_child(self) -> None:
        """Make it usable in the child."""


_watched: weakref.WeakSet[Forked] = weakref.WeakSet()

# A child must neither use nor close the connections it inherited: closing would end the parent's
# session on the server, and drop the parent's locks on a file. So they are kept here, unused.
inherited: list[object] = []


def watch(thing: Forked) -> None:
    """Have `thing` told when this process is forked, for as long as it lives."""
    _watched.add(thing)


def _tell() -> None:
    for thing in list(_watched):
        thing.after_fork_in_child()


os.register_at_fork(after_in_child=_tell)
