"""Between a client and a PostgreSQL server: one who cuts the line at a COMMIT, and a pooler that lends sessions.

Both understand the protocol as far as they need it: where a message begins and ends, what COMMIT is, and when a
transaction is over.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
_QUERY, _PARSE, _BIND, _SYNC, _CALL, _END = b"Q", b"P", b"B", b"S", b"F", b"X"
_READY, _COMPLETE = b"Z", b"C"


class _Gone(Exception):
    """The other side has hung up."""


class _Line:
    """One side of a connection, message by message."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire
        self._come = b""

    def pull(self) -> None:
        """Take in what has come; wait if that is nothing."""
        try:
            part = self.wire.recv(65536)
        except OSError:
            part = b""
        if not part:
            raise _Gone
        self._come += part

    def _take(self, number: int) -> bytes:
        while len(self._come) < number:
            self.pull()
        found, self._come = self._come[:number], self._come[number:]
        return found

    def has_message(self) -> bool:
        """Whether a whole message has come. One may come in parts, and the other side be waited for in between."""
        return len(self._come) >= 5 and len(self._come) > struct.unpack("!i", self._come[1:5])[0]

    def greeting(self) -> bytes:
        """The client's first message; to encryption it is said no."""
        while True:
            head = self._take(8)
            length, code = struct.unpack("!ii", head)
            if code not in (_SSL, _GSS):
                return head + self._take(length - 8)
            self.send(b"N")

    def message(self) -> tuple[bytes, bytes]:
        """The kind of the next message, and the whole of it."""
        head = self._take(5)
        return head[:1], head + self._take(struct.unpack("!i", head[1:])[0] - 4)

    def send(self, data: bytes) -> None:
        try:
            self.wire.sendall(data)
        except OSError:
            raise _Gone from None

    def close(self) -> None:
        # Whoever waits for it in another thread wakes up by this, and not by a close.
        with suppress(OSError):
            self.wire.shutdown(socket.SHUT_RDWR)
        self.wire.close()


class _Between:
    """Listens on a port of its own in the place of a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._folder = parse_qs(parts.query)["host"][0]
        self._user = parts.username or "postgres"
        self._database = parts.path.removeprefix("/")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._lines: list[_Line] = []
        self._closed = False
        self._start(self._accept)

    def url(self, user: str | None = None) -> str:
        """Where a client finds it."""
        port = self._listening.getsockname()[1]
        return f"postgresql://{quote(user or self._user)}@127.0.0.1:{port}/{self._database}"

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for line in self._lines:
            line.close()
        for thread in self._threads:
            thread.join(10)

    def _start(self, work: Any, *given: Any) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                wire, _ = self._listening.accept()
            except OSError:
                return
            # Else small messages wait for each other's acknowledgements.
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._serve_safely, self._line(wire))

    def _line(self, wire: socket.socket) -> _Line:
        wire.settimeout(None)
        line = _Line(wire)
        self._lines.append(line)
        return line

    def _to_server(self) -> _Line:
        wire = socket.socket(socket.AF_UNIX)
        try:
            wire.connect(f"{self._folder}/.s.PGSQL.5432")
        except OSError:
            wire.close()
            raise _Gone from None
        return self._line(wire)

    def _serve_safely(self, client: _Line) -> None:
        try:
            self._serve(client)
        except _Gone:
            pass
        finally:
            client.close()

    def _serve(self, client: _Line) -> None:
        raise NotImplementedError


BEFORE, AFTER = "before", "after"


class Cutter(_Between):
    """Cuts the line at a COMMIT: before the server has got it, or before the client has got the answer."""

    def __init__(self, url: str, *, chance: float = 0.0, seed: int = 0) -> None:
        self._due: tuple[str, int] | None = None
        self._share = chance
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        #: How often each was done.
        self.cuts = {BEFORE: 0, AFTER: 0}
        super().__init__(url)

    def cut_next(self, when: str, after: int = 0) -> None:
        """Cut the line of whoever commits next, or that many COMMITs later."""
        self._due = (when, after)

    def spare(self) -> None:
        """Cut no more."""
        self._due, self._share = None, 0.0

    def _cuts(self, when: str) -> bool:
        with self._lock:
            if self._due is not None and self._due[0] == when:
                left = self._due[1]
                self._due = None if left == 0 else (when, left - 1)
                if left:
                    return False
            elif self._random.random() >= self._share:
                return False
            self.cuts[when] += 1
            return True

    def _serve(self, client: _Line) -> None:
        greeting = client.greeting()
        server = self._to_server()
        try:
            server.send(greeting)
            self._start(self._back, client, server)
            self._forth(client, server)
        finally:
            server.close()

    def _forth(self, client: _Line, server: _Line) -> None:
        prepared: dict[bytes, bytes] = {}
        while True:
            kind, message = client.message()
            commits = False
            if kind == _QUERY:
                commits = message[5:].upper().startswith(b"COMMIT")
            elif kind == _PARSE:
                name, query, _ = message[5:].split(b"\0", 2)
                prepared[name] = query
            elif kind == _BIND:
                commits = prepared.get(message[5:].split(b"\0", 2)[1], b"").upper().startswith(b"COMMIT")
            if commits and self._cuts(BEFORE):
                return
            server.send(message)

    def _back(self, client: _Line, server: _Line) -> None:
        with suppress(_Gone):
            while True:
                kind, message = server.message()
                if kind == _COMPLETE and message[5:].startswith(b"COMMIT") and self._cuts(AFTER):
                    break
                client.send(message)
        client.close()
        server.close()


class Pooler(_Between):
    """Gives every transaction another of few sessions, as a pooler in transaction mode may."""

    def __init__(self, url: str, sessions: int = 3) -> None:
        self.most = sessions
        self._free: deque[_Line] = deque()
        self._opened = 0
        self._changed = threading.Condition()
        self._hello = b""
        #: How many transactions were given a session.
        self.lent = 0
        super().__init__(url)

    def _serve(self, client: _Line) -> None:
        greeting = client.greeting()
        if struct.unpack("!i", greeting[4:8])[0] == _CANCEL:
            return
        fields = greeting[8:].split(b"\0")
        if b"options" in fields[::2]:
            client.send(_refusal("unsupported startup parameter: options"))
            return
        if not self._hello:
            self._give_back(self._lend())
        client.send(self._hello)
        while True:
            kind, message = client.message()
            if kind == _END:
                return
            session = self._lend()
            try:
                self._one_transaction(client, session, kind, message)
            except BaseException:
                self._end(session)
                raise
            self._give_back(session)

    def _one_transaction(self, client: _Line, session: _Line, kind: bytes, message: bytes) -> None:
        """Hand messages on until the server is ready and in no transaction."""
        owed = 0
        while True:
            if kind == _END:
                raise _Gone
            owed += kind in (_QUERY, _SYNC, _CALL)
            session.send(message)
            while not client.has_message():
                readable, _, _ = select.select([client.wire, session.wire], [], [])
                for line in (client, session):
                    if line.wire in readable:
                        line.pull()
                while session.has_message():
                    answer, whole = session.message()
                    client.send(whole)
                    owed -= answer == _READY
                    if answer == _READY and owed == 0 and whole[5:6] == b"I":
                        return
            kind, message = client.message()

    def _lend(self) -> _Line:
        with self._changed:
            self.lent += 1
            there = self._changed.wait_for(lambda: self._free or self._opened < self.most, 60)
            assert there, "no session is given back"
            if self._opened == self.most:
                # The one that has rested longest: hardly ever the one this client had before.
                return self._free.popleft()
            self._opened += 1
        session = self._to_server()
        given = f"user\0{self._user}\0database\0{self._database}\0application_name\0pooler\0\0".encode()
        session.send(struct.pack("!ii", len(given) + 8, 196608) + given)
        hello = b""
        while True:
            kind, message = session.message()
            hello += message
            if kind == b"E":
                raise AssertionError(message)
            if kind == _READY:
                break
        self._hello = hello
        return session

    def _give_back(self, session: _Line) -> None:
        with self._changed:
            self._free.append(session)
            self._changed.notify()

    def _end(self, session: _Line) -> None:
        session.close()
        with self._changed:
            self._opened -= 1
            self._changed.notify()


def _refusal(text: str) -> bytes:
    fields = f"SFATAL\0VFATAL\0C08P01\0M{text}\0\0".encode()
    return b"E" + struct.pack("!i", len(fields) + 4) + fields
