"""Where clients of other processes come in: a socket without a name in the file system, and a secret.

A client that is unpickled anywhere on this machine has the address and the secret, and connects when it is first
used. Both sides prove that they know the secret before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge


@dataclass(frozen=True)
class Address:
    """Where a server is, and what to say there."""

    path: str
    secret: bytes

    @classmethod
    def new(cls) -> Address:
        name = f"swath-inference-{os.getpid()}-{secrets.token_hex(8)}"
        # Linux has sockets that are no files, so that nothing stays behind whoever is killed.
        path = f"\0{name}" if sys.platform == "linux" else os.path.join(tempfile.mkdtemp(prefix="swath-"), name)
        return cls(path, secrets.token_bytes(32))

    def connect(self) -> Connection:
        """Raises OSError, or EOFError, if there is nobody (any more)."""
        return Client(self.path, "AF_UNIX", authkey=self.secret)

    def __repr__(self) -> str:  # not the secret
        return f"Address({self.path!r})"


class Reception:
    """Listens at an address; each client gets a thread, which calls ``attend`` with its connection."""

    def __init__(self, address: Address, attend: Callable[[Connection], None]) -> None:
        self._address = address
        self._attend = attend
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address.path)
        self._socket.listen(128)
        self._thread = threading.Thread(target=self._accept, name="swath-reception", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                continue  # a client that went away again, or no descriptor left for it
            connection = Connection(accepted.detach())
            threading.Thread(target=self._receive, args=(connection,), name="swath-client", daemon=True).start()

    def _receive(self, connection: Connection) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._connections.add(connection)
        try:
            # In this thread: whoever connects and says nothing keeps nobody else waiting.
            deliver_challenge(connection, self._address.secret)
            answer_challenge(connection, self._address.secret)
            self._attend(connection)
        except (AuthenticationError, EOFError, OSError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connections = list(self._connections)
            for connection in connections:  # its thread, which may be reading, closes it
                _hang_up(connection.fileno())
        _hang_up(self._socket.fileno())
        self._thread.join(1.0)
        self._socket.close()
        if not self._address.path.startswith("\0"):
            shutil.rmtree(os.path.dirname(self._address.path), ignore_errors=True)


def _hang_up(descriptor: int) -> None:
    """Wake whoever waits for this socket. (Closing its descriptor would not.)"""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
        same.shutdown(socket.SHUT_RDWR)
