"""The turn to run a pipeline: one process has it at a time, so that two do not do the same work."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from lakebook.errors import LakebookError, PipelineBusy
from lakebook.lake.lake import Lake
from lakebook.registry.pipelines import PipelineRecord, claim_pipeline, release_claim, renew_claim
from lakebook.registry.transactions import new_id


class Turn:
    """A turn that is held, and renewed in the background. Losing it costs work, never rows."""

    def __init__(self, lake: Lake, record: PipelineRecord) -> None:
        self._lake = lake
        self._record = record
        self.id = new_id()
        self.token = 0
        self._closed = False

    def __enter__(self) -> Turn:
        seconds = self._lake.settings.lease_seconds
        token = self._lake.registry.write(
            lambda transaction: claim_pipeline(transaction, self._record.id, self.id, seconds)
        )
        if token is None:
            raise PipelineBusy(
                "another process runs it, or did until a moment ago",
                on=self._record.shown,
                remedy=f"Let it, or try again in {seconds:g} seconds, when its turn has run out",
            )
        self.token = token
        self._lake.renewals.hold_pin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def renew(self) -> None:
        """Keep it for another while."""
        if not self._closed:
            seconds = self._lake.settings.lease_seconds
            self._lake.registry.write(
                lambda transaction: renew_claim(transaction, self._record.id, self.token, seconds)
            )

    def close(self) -> None:
        """Give it back. If the registry does not answer, it runs out by itself."""
        self._lake.renewals.let_go(self.id)
        if not self._closed:
            self._closed = True
            with suppress(LakebookError):
                self._lake.registry.write(lambda transaction: release_claim(transaction, self._record.id, self.token))
