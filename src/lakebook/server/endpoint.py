"""The REST catalog in a thread of its own, on the loopback address."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from types import TracebackType

import uvicorn

from lakebook import forks
from lakebook.errors import InvalidSetting, TerminalError
from lakebook.server.rest import RestApp, ServedCatalog

HOST = "127.0.0.1"

#: How long a connection without a request is kept. A client that sends a commit just when it is
#: closed cannot tell what came of it, so it is longer than clients keep one.
KEEP_ALIVE_SECONDS = 3600
#: How long `stop` waits for requests at work.
STOP_SECONDS = 30


class RestEndpoint:
    """An Iceberg REST catalog at `uri`, for those who have the `token`, from `start` to `stop`."""

    def __init__(self, catalog: ServedCatalog, token: str | None = None) -> None:
        if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
            raise InvalidSetting("a token is of printable ASCII characters without spaces", on="token")
        self.token = secrets.token_urlsafe(32) if token is None else token
        self._app = RestApp(catalog, self.token)
        self._lock = threading.Lock()
        self._running: _Running | None = None
        forks.watch(self)

    @property
    def uri(self) -> str:
        """Where it is, while it runs."""
        running = self._running
        if running is None:
            raise TerminalError("it does not run", on="REST endpoint", remedy="Start it first")
        return running.uri

    def start(self) -> None:
        """Begin to serve, on a port of its own; returns when it can be called. Does nothing if it runs."""
        with self._lock:
            if self._running is None:
                self._running = _Running(self._app)

    def stop(self) -> None:
        """Let the requests at work end, and the thread with them. Does nothing if it does not run."""
        with self._lock:
            running, self._running = self._running, None
            if running is not None:
                running.stop()

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's: its thread, its socket, and a lock it may have held."""
        self._lock = threading.Lock()
        running, self._running = self._running, None
        if running is not None:
            # Else the port would stay open for as long as the child lives, and nobody would answer there.
            running.socket.close()

    def __enter__(self) -> RestEndpoint:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Running:
    """One run of the server, from its first socket to the end of its thread."""

    def __init__(self, app: RestApp) -> None:
        # Bound here and handed on, so that nobody else can take the port in between.
        self.socket = socket.create_server((HOST, 0))
        self.uri = f"http://{HOST}:{self.socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lakebook-rest", daemon=True)
        self._thread.start()
        self._server.ready.wait()
        if not self._server.started:
            self._thread.join()
            raise TerminalError("it could not be started", on="REST endpoint") from self._failed

    def stop(self) -> None:
        """End the server and its thread."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self.socket])
        except BaseException as error:  # noqa: BLE001 - `start` tells of it; the thread has nobody to tell
            self._failed = error
        finally:
            self.socket.close()
            self._server.ready.set()


class _Server(uvicorn.Server):
    """Uvicorn's server, without its hands on the process's signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the program."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        self.ready.set()
