"""Claims of workers while they are worked on: renewed with the leases of this process, and let go at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lakebook.errors import LakebookError
from lakebook.lake.lake import Lake
from lakebook.registry.transactions import Transaction


class HeldClaim:
    """A claim while it is worked on. If it was lost, the transaction that enters the work will tell."""

    def __init__(
        self, lake: Lake, token: str, renew: Callable[[Transaction], object], end: Callable[[Transaction], object]
    ) -> None:
        self._lake = lake
        self._renew = renew
        self._end = end
        self.id = token

    def renew(self) -> None:
        """Keep it for another while."""
        self._lake.registry.write(self._renew)

    def close(self) -> None:
        """Let go of it. If the registry does not answer, it runs out by itself."""
        self._lake.renewals.let_go(self.id)
        with suppress(LakebookError):
            self._lake.registry.write(self._end)


@contextmanager
def held(
    lake: Lake, token: str, renew: Callable[[Transaction], object], end: Callable[[Transaction], object]
) -> Iterator[None]:
    """Hold a claim that was taken while the block runs."""
    claim = HeldClaim(lake, token, renew, end)
    lake.renewals.hold_pin(claim)
    try:
        yield
    finally:
        claim.close()
