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
from lakebook.components.names import COMPONENTS, check_components
from lakebook.components.orchestrator import Orchestrator
from lakebook.components.pipeline_runner import PipelineRunner
from lakebook.components.snapshotter import Snapshotter
from lakebook.components.topic_publisher import TopicPublisher
from lakebook.components.view_keeper import ViewKeeper
from lakebook.lake.lake import Lake

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
    """Looks after all tables of a book while it has the scheduler's turn; else it waits for it."""

    def __init__(
        self,
        lake: Lake,
        spark: Callable[[], SparkSession] | None = None,
        components: Sequence[str] = COMPONENTS,
    ) -> None:
        names = check_components(components)
        self._lake = lake
        self.components: Mapping[str, Component] = {name: make_component(name, lake, spark) for name in names}
        subscribers = [item for item in self.components.values() if isinstance(item, Subscriber)]
        self.astha = Astha(
            lake.registry, subscribers, on_claimed=self._begin, on_lost=self._end, describe=self._described
        )
        self._started: list[Component] = []
        self._said: tuple[float, dict[str, Any]] = (float("-inf"), {})

    # --- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the work itself begins when this process has the turn."""
        self.astha.start()

    def stop(self) -> None:
        """End all work cleanly: what is under way is finished, and how far it came is written down."""
        self.astha.stop()

    @property
    def active(self) -> bool:
        """Whether this process looks after the tables now; if not, another does, or it is about to begin."""
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

    def _begin(self) -> None:
        self._end()
        for component in self.components.values():
            component.start()
            self._started.append(component)

    def _end(self) -> None:
        while self._started:
            component = self._started.pop()
            try:
                component.stop()
            except Exception:
                # The others have to end all the same.
                LOG.exception("%s did not end cleanly", component.name)

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
