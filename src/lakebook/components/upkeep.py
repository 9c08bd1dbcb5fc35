"""Astha and all components together, in one process: what `lakebook run` and `Book.running` run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lakebook.cdc.astha import Astha, Role
from lakebook.cdc.subscribers import Subscriber
from lakebook.components.compactor import Compactor
from lakebook.components.component import Component
from lakebook.components.iceberg_updater import IcebergUpdater
from lakebook.components.janitor import Janitor
from lakebook.components.names import COMPONENTS, WORKERS, check_components, check_workers
from lakebook.components.orchestrator import Orchestrator
from lakebook.components.pipeline_runner import PipelineRunner
from lakebook.components.snapshotter import Snapshotter
from lakebook.components.topic_publisher import TopicPublisher
from lakebook.components.view_keeper import ViewKeeper
from lakebook.errors import EpochChanged, InvalidInput, LakebookError
from lakebook.lake.lake import Lake
from lakebook.registry.epoch import check_epoch

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

LOG = logging.getLogger("lakebook.components")

# Components say how they stand less often than the turn is renewed: some of them ask the registry.
_STATUS_SECONDS = 5.0


def make_component(name: str, lake: Lake, spark: Callable[[], SparkSession] | None = None) -> Component:
    """A component by its name."""
    makers: Mapping[str, Callable[[], Component]] = {
        "iceberg_updater": lambda: IcebergUpdater(lake),
        "orchestrator": lambda: Orchestrator(lake),
        "snapshotter": lambda: Snapshotter(lake),
        "compactor": lambda: Compactor(lake, spark),
        "janitor": lambda: Janitor(lake),
        "topic_publisher": lambda: TopicPublisher(lake),
        "views": lambda: ViewKeeper(lake, spark),
        "pipelines": lambda: PipelineRunner(lake, spark),
    }
    check_components([name])
    return makers[name]()


class Upkeep:
    """Looks after all tables of a book while it has the scheduler's turn; else it waits for it, and shares the work.

    Workers claim what they work on. So they begin with the process and go on while the turn is won and lost; all
    others live while it is held.
    """

    def __init__(
        self,
        lake: Lake,
        spark: Callable[[], SparkSession] | None = None,
        components: Sequence[str] | None = None,
        *,
        worker: bool = False,
    ) -> None:
        if components is None:
            components = WORKERS if worker else COMPONENTS
        names = check_workers(components) if worker else check_components(components)
        self._lake = lake
        self.components: Mapping[str, Component] = {name: make_component(name, lake, spark) for name in names}
        # Without Spark there is nothing that a worker could do.
        shares = spark is not None and lake.settings.worker_interval > 0
        #: What works while another process has the turn, too.
        self.workers: tuple[str, ...] = tuple(name for name in names if shares and name in WORKERS)
        #: Whether it is to have the turn, if that is free.
        self.takes_turns = not worker
        if worker and not shares:
            raise InvalidInput(
                "a worker without Spark, or with a `worker_interval` of 0, would do nothing",
                on="upkeep",
                remedy="Give it Spark, and set how often it looks for work",
            )
        subscribers = [item for item in self.components.values() if isinstance(item, Subscriber)]
        self.astha = Astha(
            lake.registry,
            subscribers,
            on_claimed=self._take_turn,
            on_lost=self._lose_turn,
            on_stopped=self._end,
            describe=self._described,
        )
        self._started: list[str] = []
        self._said: tuple[float, dict[str, Any]] = (float("-inf"), {})
        self._failure: EpochChanged | None = None
        self._looked_at = float("-inf")

    # --- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin: workers at once, all else when this process has the turn."""
        self._begin(self.workers, told=False)
        if self.takes_turns:
            self.astha.start()

    def stop(self) -> None:
        """End all work cleanly: what is under way is finished, and how far it came is written down."""
        self.astha.stop()
        if not self.takes_turns:
            self._end()

    @property
    def failure(self) -> BaseException | None:
        """Why it can never go on: the book's life is over."""
        if self.takes_turns:
            return self.astha.failure
        # Who takes no turn hears of it by looking; each write would tell, but there may be none for long.
        now = self._lake.clock.monotonic()
        if self._failure is None and now - self._looked_at >= _STATUS_SECONDS:
            self._looked_at = now
            try:
                check_epoch(self._lake.registry)
            except EpochChanged as error:
                self._failure = error
            except LakebookError:
                LOG.warning("the registry does not answer", exc_info=True)
        return self._failure

    @property
    def active(self) -> bool:
        """Whether this process has the turn; if not, another has it, or it is about to take it."""
        return self.astha.role is Role.ACTIVE

    def wait_active(self, timeout: float) -> bool:
        """Wait until this process has the turn; whether it has."""
        return self.astha.wait_active(timeout)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until everything that is committed by now has reached the components; whether it has."""
        return self.astha.wait_idle(timeout)

    def status(self) -> dict[str, Any]:
        """What Astha and each component does, in plain values."""
        return self.astha.status()

    # What follows is called by one thread at a time: who starts this, and then Astha.

    def _take_turn(self) -> None:
        self._lose_turn()
        self._begin(tuple(self.components), told=True)

    def _lose_turn(self) -> None:
        """End what needs the turn. What workers have begun is theirs by their claims, and is not waited for."""
        for name in self.workers:
            self.components[name].told = False
        self._end(keep=self.workers)

    def _begin(self, names: Sequence[str], *, told: bool) -> None:
        for name in names:
            component = self.components[name]
            component.told = told
            # Also one that has begun before: its thread may have ended.
            component.start()
            if name not in self._started:
                self._started.append(name)

    def _end(self, keep: Sequence[str] = ()) -> None:
        for name in [name for name in reversed(self._started) if name not in keep]:
            self._started.remove(name)
            try:
                self.components[name].stop()
            except Exception:
                # The others have to end all the same.
                LOG.exception("%s did not end cleanly", name)

    def _described(self) -> Mapping[str, Any]:
        said_at, said = self._said
        now = self._lake.clock.monotonic()
        if now - said_at >= _STATUS_SECONDS:
            said = {
                "components": list(self.components),
                "state": {name: self._state_of(item) for name, item in self.components.items()},
            }
            self._said = (now, said)
        return said

    def _state_of(self, component: Component) -> Mapping[str, Any]:
        try:
            return component.status()
        except Exception as error:  # noqa: BLE001 - how one stands must not keep the turn from being renewed
            return {"error": f"{type(error).__name__}: {error}"}
