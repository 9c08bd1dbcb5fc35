"""The thread of a process that renews what it holds: leases of readers, on tables and topics, and inserts at work."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from lakebook import forks
from lakebook.errors import BookClosed, LakebookError
from lakebook.registry.inserts import renew_insert
from lakebook.registry.leases import renew_leases
from lakebook.registry.registry import Registry
from lakebook.registry.transactions import Transaction

if TYPE_CHECKING:
    from lakebook.lake.leasing import Lease


class HeldPin(Protocol):
    """A lease on topics, as it is renewed."""

    id: str

    def renew(self) -> None:
        """Renew it, if somebody still reads what it pins."""

    def close(self) -> None:
        """Let go of it."""


class Renewals:
    """Renews leases and inserts in the background, three times in their time."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._leases: dict[str, Lease] = {}
        self._inserts: set[str] = set()
        self._pins: dict[str, HeldPin] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's: its leases, its inserts, its thread, and a lock it may have held."""
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._leases, self._inserts, self._pins, self._thread = {}, set(), {}, None

    def hold_lease(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        with self._lock:
            self._leases[lease.id] = lease
        self._start()

    def hold_pin(self, pin: HeldPin) -> None:
        """Renew a lease on topics from now on."""
        with self._lock:
            self._pins[pin.id] = pin
        self._start()

    def hold_insert(self, commit_id: str) -> None:
        """Say from time to time that an insert is at work."""
        with self._lock:
            self._inserts.add(commit_id)
        self._start()

    def let_go(self, held: str) -> None:
        """Renew a lease or an insert no more."""
        with self._lock:
            self._leases.pop(held, None)
            self._pins.pop(held, None)
            self._inserts.discard(held)

    def leases(self) -> list[Lease]:
        """The leases that this process holds."""
        with self._lock:
            return list(self._leases.values())

    def close(self) -> None:
        """Let go of topics that are still read, and stop the thread."""
        with self._lock:
            pins = list(self._pins.values())
        for pin in pins:
            pin.close()
        self._closed = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="lakebook-renewals", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        settings = self._registry.settings
        pause = min(settings.lease_seconds, settings.insert_alive) / 3
        while not self._wake.wait(pause):
            try:
                self.renew()
            except BookClosed:
                return
            except LakebookError:
                # The registry does not answer: tried again in a while, before the leases run out if it can be.
                continue

    def renew(self) -> None:
        """Renew all that is held, now."""
        now = self._registry.clock.now_ms()
        with self._lock:
            leases = {lease.id: lease for lease in self._leases.values() if lease.may_be_renewed(now)}
            inserts = sorted(self._inserts)
            pins = list(self._pins.values())
        if leases or inserts:
            self._renew(leases, inserts)
        for pin in pins:
            pin.renew()

    def _renew(self, leases: dict[str, Lease], inserts: list[str]) -> None:
        settings = self._registry.settings

        def work(transaction: Transaction) -> set[str]:
            for commit_id in inserts:
                renew_insert(transaction, commit_id, settings.insert_alive)
            return renew_leases(transaction, sorted(leases), settings.lease_seconds) if leases else set()

        asked = self._registry.clock.monotonic()
        held = self._registry.write(work)
        for lease_id, lease in leases.items():
            if lease_id in held:
                lease.note_renewed(asked)
            else:
                lease.note_lost()
