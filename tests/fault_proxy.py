"""Between a client and a store that is spoken to as S3 is: one who answers in its place, late, in part or not at all.

It takes a request as a whole, looks for the first rule that the request fits, and does what the rule says. Without
one it passes the request on, and the answer back.
"""

from __future__ import annotations

import random
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

#: What becomes of a request. These are not carried out.
ERROR, SLOW_DOWN, REFUSED, CLOSED, HELD = "500", "503", "403", "closed", "held"
#: These are carried out; what the client hears of it is the matter.
LATE, SHORT, LOST = "late", "short", "lost"
#: The store does not hear that something is to be created only where there is nothing.
UNCONDITIONAL = "unconditional"
#: A store may find out after it has begun to answer: the status is 200, and the body says that it failed.
ERROR_INSIDE = "200 with an error"
ENDLESS = 1_000_000

_TOLD = {
    ERROR: (500, "InternalError"),
    SLOW_DOWN: (503, "SlowDown"),
    REFUSED: (403, "AccessDenied"),
    ERROR_INSIDE: (200, "InternalError"),
}
_SIGNER = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/s3/aws4_request")
_DATED = re.compile(rb"(<LastModified>)([^<]+Z)(</LastModified>)")
_BETWEEN_TWO = frozenset({"connection", "transfer-encoding", "keep-alive", "expect", "content-length"})


@dataclass
class Rule:
    """The next requests that fit get a fault; a request is told by its method and its address."""

    fault: str
    fits: re.Pattern[str]
    left: int = 1
    seconds: float = 0.0
    #: Whether a request that fits gets it; the others count for nothing.
    chosen: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Answer:
    """What the store has answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class Head:
    """What came before a request's body."""

    method: str
    target: str
    host: str
    headers: dict[str, str]

    @property
    def signer(self) -> tuple[str, str, str | None]:
        """Whose key has signed it, for which region, and the token that came with it."""
        found = _SIGNER.search(self.headers.get("authorization", ""))
        assert found is not None, self.headers
        return found[1], found[2], self.headers.get("x-amz-security-token")


class FaultProxy:
    """Listens on a port of its own in the place of a store.

    With a name, it is for those who speak to a store of that name through a proxy of HTTP: they need not find the name,
    nor one with a bucket's before it.
    """

    def __init__(self, endpoint: str, name: str = "", *, ahead: timedelta = timedelta()) -> None:
        """Stand before a store, by whose clock it is later by `ahead`."""
        self._store = urlsplit(endpoint)
        self._name = name
        self._ahead = ahead
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        #: Every request as it came, and what it got, if that was a fault.
        self.requests: list[tuple[str, str | None]] = []
        self.heads: list[Head] = []
        self.closed = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Between)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    # --- rules -----------------------------------------------------------------

    @contextmanager
    def faulty(
        self,
        fault: str,
        fits: str = "",
        times: int = 1,
        *,
        seconds: float = 0.0,
        chosen: Callable[[], bool] | None = None,
    ) -> Iterator[Rule]:
        """Give the next requests that fit a fault, until the block ends."""
        rule = Rule(fault, re.compile(fits), times, seconds, chosen or (lambda: True))
        with self._lock:
            self._rules.append(rule)
        try:
            yield rule
        finally:
            with self._lock:
                self._rules.remove(rule)

    def at_random(self, fault: str, chance: random.Random, share: float, times: int, fits: str = "") -> Any:
        """Give a share of the requests a fault, so many at most, until the block ends."""
        return self.faulty(fault, fits, times, chosen=lambda: chance.random() < share)

    def rule_for(self, request: str) -> Rule | None:
        """The rule that a request falls under, which has one time less left."""
        with self._lock:
            for rule in self._rules:
                if rule.left and rule.fits.search(request) and rule.chosen():
                    rule.left -= 1
                    self.requests.append((request, rule.fault))
                    return rule
            self.requests.append((request, None))
            return None

    def note(self, method: str, target: str, headers: Any) -> str:
        """Write down how a request came; what is asked of the store, to which it has to be said another way."""
        host = headers.get("Host", "")
        with self._lock:
            self.heads.append(Head(method, target, host, {name.lower(): value for name, value in headers.items()}))
        if not target.startswith("http://"):
            return target
        plain = target.partition("://")[2].partition("/")[2]
        bucket = host.partition(":")[0].removesuffix(self._name).rstrip(".")
        return f"/{bucket}/{plain}" if bucket else f"/{plain}"

    def count(self, fits: str) -> int:
        """How many requests have come that fit."""
        with self._lock:
            return sum(re.search(fits, request) is not None for request, _ in self.requests)

    def faults(self) -> int:
        """How many faults there have been."""
        with self._lock:
            return sum(fault is not None for _, fault in self.requests)

    # --- the store -------------------------------------------------------------

    def ask(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        """What the store answers."""
        assert self._store.hostname is not None
        connection = HTTPConnection(self._store.hostname, self._store.port, timeout=60)
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() not in _BETWEEN_TWO:
                    # The store looks for a bucket in a name that is not its own.
                    connection.putheader(name, self._store.netloc if name.lower() == "host" and self._name else value)
            connection.putheader("Connection", "close")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _BETWEEN_TWO]
            # Of what a HEAD asks about, the length is told without it.
            length = (answer.getheader("Content-Length") or "0") if method == "HEAD" else str(len(content))
            return self._dated(Answer(answer.status, [*kept, ("Content-Length", length)], content))
        finally:
            connection.close()

    def _dated(self, answer: Answer) -> Answer:
        """An answer of a store whose clock is not ours."""
        if not self._ahead:
            return answer
        headers = [
            (name, format_datetime(parsedate_to_datetime(value) + self._ahead, usegmt=True))
            if name.lower() in ("date", "last-modified")
            else (name, value)
            for name, value in answer.headers
        ]
        # The text has the same length as before.
        body = _DATED.sub(lambda found: found[1] + self._later(found[2]) + found[3], answer.body)
        return Answer(answer.status, headers, body)

    def _later(self, text: bytes) -> bytes:
        moment = datetime.fromisoformat(text.decode()) + self._ahead
        return f"{moment.strftime('%Y-%m-%dT%H:%M:%S')}.{moment.microsecond // 1000:03}Z".encode()

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Those whose client keeps its connection would be waited for.
    block_on_close = False
    request_queue_size = 64
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """That a client is gone is what this is for."""


class _Between(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle_one_request(self) -> None:
        with suppress(OSError, HTTPException):
            super().handle_one_request()
            return
        self.close_connection = True

    def _take(self) -> None:
        body = self._chunked() if "chunked" in self.headers.get("Transfer-Encoding", "") else self._sized()
        proxy = self.server.proxy
        target = proxy.note(self.command, self.path, self.headers)
        rule = proxy.rule_for(f"{self.command} {target}")
        fault = rule.fault if rule is not None else None
        if fault == CLOSED:
            self._hang_up()
        elif fault == HELD:
            self._hold()
        elif fault in _TOLD:
            status, code = _TOLD[fault]
            told = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>no</Message></Error>'
            self._answer(Answer(status, [("Content-Type", "application/xml")], told.encode()))
        else:
            headers = list(self.headers.items())
            if fault == UNCONDITIONAL:
                headers = [(name, value) for name, value in headers if name.lower() != "if-none-match"]
            answer = proxy.ask(self.command, target, headers, body)
            if fault == LATE and rule is not None:
                proxy.closed.wait(rule.seconds)
            if fault == LOST:
                self._hang_up()
            elif fault == SHORT:
                self._answer(answer, cut=True)
            else:
                self._answer(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _take  # noqa: N815 - the names of the library

    def _sized(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length) if length else b""

    def _chunked(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    def _answer(self, answer: Answer, *, cut: bool = False) -> None:
        headers = answer.headers
        if not any(name.lower() == "content-length" for name, _ in headers):
            headers = [*headers, ("Content-Length", str(len(answer.body)))]
        head = (
            f"HTTP/1.1 {answer.status} Told\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
        )
        said = head.encode("latin-1") + (answer.body if self.command != "HEAD" else b"")
        if cut:
            # Of what has no body, the head ends in the midst of its first lines.
            said = said[: -(len(answer.body) + 1) // 2] if answer.body else said[:30]
        self.wfile.write(said)
        if cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _hold(self) -> None:
        """Say nothing until the client has gone."""
        self.close_connection = True
        while not self.server.proxy.closed.is_set():
            if select.select([self.connection], [], [], 0.05)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                return

    def log_message(self, *_: object) -> None:
        """Nothing: the tests look at `requests`."""
