"""The HTTP session to an OpenTelemetry collector, which cannot be held up by what the collector answers.

Nothing here needs an answer but its status. So the head of an answer has a bound in time, however slowly its bytes
come. A body is read only so that its connection can be used again, within bounds in bytes and time. One that breaks
off, or has no end, costs the connection, and says nothing of the spans, which the collector has. No redirect is
followed: spans go where the operator has said.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

MAX_ANSWER_BYTES = 64 * 1024


class BoundedSession(requests.Session):
    """A session whose requests end, with an answer or an exception, within a few times ``within_s``."""

    def __init__(self, within_s: float) -> None:
        super().__init__()
        self._within_s = within_s
        for scheme in ("http://", "https://"):
            self.mount(scheme, _WatchedAdapter())

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """Does what the base class does, and raises ``requests.ConnectionError`` for a redirect."""
        response = super().request(*args, **{**kwargs, "allow_redirects": False, "stream": True})
        if not self._ends(response):
            response.close()
        response._content = b""
        if 300 <= response.status_code < 400:  # which its users take for a success
            raise requests.ConnectionError("the collector sends spans elsewhere")
        return response

    def _ends(self, response: requests.Response) -> bool:
        """Reads the body of ``response``. Returns whether it came to its end within the bounds."""
        until_s, size = time.monotonic() + self._within_s, 0
        with contextlib.suppress(HTTPError):  # what reads of a raw body raise, in place of requests' own errors
            while size <= MAX_ANSWER_BYTES and time.monotonic() <= until_s:
                piece = response.raw.read1(MAX_ANSWER_BYTES)
                if not piece:
                    return True
                size += len(piece)
        return False


class _Watched(HTTPConnection):
    """Each read of a head has a bound of its own, but a head is read line by line: this bounds all of it."""

    _is_cut = False

    def getresponse(self) -> Any:
        bound_s = self.timeout if isinstance(self.timeout, int | float) else None
        timer = threading.Timer(bound_s or 0.0, self._cut)
        timer.daemon = True
        if bound_s:
            timer.start()
        try:
            response = super().getresponse()
        finally:
            timer.cancel()
        if self._is_cut:  # half a head may look like a whole one
            response.close()
            self.close()
            raise TimeoutError("the head of the answer comes too slowly")
        return response

    def _cut(self) -> None:
        self._is_cut = True
        with contextlib.suppress(OSError, AttributeError):  # it may be closed already
            self.sock.shutdown(socket.SHUT_RDWR)


class _WatchedTls(_Watched, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Watched


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTls


class _WatchedAdapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
