"""Requests whose head or framing is wrong, unusual or ambiguous."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

from tests.attacks.case import (
    BAD,
    CHAT,
    DETOKENIZE,
    EITHER,
    FINE,
    TEXT,
    TOKENIZE,
    At,
    HttpCase,
    body_with,
    head,
    post,
)

BODY = body_with(TOKENIZE, {})
LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
ONE_CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
END = b"0\r\n\r\n"
SMUGGLED = head("GET", "/smuggled")
NOT_FOUND = frozenset({404})
TOO_LARGE = frozenset({431, 400, 414})
TOO_LONG_A_PATH = frozenset({414})
NOT_IMPLEMENTED = frozenset({501})
TLS_HELLO = bytes.fromhex(
    "16030100a5010000a10303" + "5a" * 32 + "20" + "5a" * 32 + "0006130113021303" + "0100" + "0052" + "00" * 0x52
)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

OTHER_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "PROPFIND", "PURGE")
PATHS = {
    "two slashes": ("/" + TEXT, NOT_FOUND),
    "two slashes inside": ("/v1//completions", NOT_FOUND),
    "a slash at the end": (TEXT + "/", NOT_FOUND),
    "capital letters": ("/V1/Completions", NOT_FOUND),
    "a NUL, escaped": (TEXT + "%00", NOT_FOUND),
    "a parameter": (TEXT + ";x=y", NOT_FOUND),
    "upwards": ("/../../etc/passwd", NOT_FOUND),
    "upwards, escaped": ("/%2e%2e/%2e%2e/etc/passwd", NOT_FOUND),
    "upwards behind a prefix": ("/v1/models/../../instances", NOT_FOUND),
    "escaped twice": ("/%252e%252e/", NOT_FOUND),
    "a backslash": ("/v1\\completions", NOT_FOUND),
    "half an escape": ("/%", NOT_FOUND | BAD),
    "no escape": ("/%zz", NOT_FOUND | BAD),
    "bytes that are not UTF-8, escaped": ("/%ff%fe", NOT_FOUND | BAD),
    "bytes that are not UTF-8": ("/\xff\xfe", NOT_FOUND | BAD),
    "line breaks, escaped": ("/x%0d%0aSet-Cookie:%20x", NOT_FOUND),
    "30,000 segments": ("/x" * 30_000, TOO_LONG_A_PATH),
    "a query of 60,000 bytes": ("/health?" + "x" * 60_000, TOO_LONG_A_PATH),
    "a fragment": ("/health#x", FINE | BAD),
    "the host in it": ("http://elsewhere/health", FINE),
    "a host with a password": ("http://a:b@elsewhere/health", FINE | BAD),
    "another scheme": ("ftp://elsewhere/health", FINE | BAD),
    "nothing but a star": ("*", NOT_FOUND | BAD),
    "a name without a slash": ("health", BAD | NOT_FOUND),
    "a model upwards": ("/v1/models/..%2f..%2f", NOT_FOUND),
    "a query of 8,000 bytes": ("/health?" + "x" * 8_000, FINE),
    "a model of 10,000 characters": ("/v1/models/" + "x" * 10_000, TOO_LONG_A_PATH),
}
ODD_HEADERS = {
    "an unknown one": "X-Unknown: x",
    "the same one a hundred times": "\r\n".join(["X-Same: x"] * 100),
    "bytes that are not ASCII": "X-Bytes: \xff\xfe\x80",
    "60,000 bytes of cookies": "Cookie: " + "x" * 60_000,
    "a request id of 10,000 characters": "X-Request-Id: " + "x" * 10_000,
    "a request id with quotes and blanks": 'X-Request-Id: a"b c',
    "a request id that is not ASCII": "X-Request-Id: \xe9\xff",
    "two request ids": "X-Request-Id: a\r\nX-Request-Id: b",
    "a forged ticket": "X-Pdserve-Ticket: AAAA",
    "internal headers": "X-Pdserve-Request: 1\r\nX-Pdserve-Ignored: x\r\nPdserve-Secret: x",
    "forwarded from elsewhere": "X-Forwarded-For: ::1, 127.0.0.1\r\nForwarded: for=_x;proto=https",
    "a media type that makes no sense": "Content-Type: */;;;==",
    "a media type with a charset": "Content-Type: application/json; charset=utf-16",
    "an Accept that makes no sense": "Accept: \xff;q=nan",
    "an authorization of one word": "Authorization: x",
    "an authorization that is not ASCII": "Authorization: Bearer \xff",
    "an authorization of 10,000 characters": "Authorization: Bearer " + "x" * 10_000,
    "conditions": 'If-None-Match: *\r\nIf-Modified-Since: never\r\nRange: bytes=0-0\r\nIf-Match: "x"',
    "no wish to go on": "Connection: close",
    "hop-by-hop tricks": "Connection: content-length, host, x-request-id\r\nTE: trailers\r\nTrailer: Content-Length",
    "a proxy's": "Proxy-Connection: keep-alive\r\nProxy-Authorization: x\r\nVia: 1.0 x\r\nMax-Forwards: 0",
    "another method": "X-HTTP-Method-Override: DELETE",
    "another path": "X-Original-URL: /instances\r\nX-Rewrite-URL: /instances",
}
"""A correct request with these headers is answered as if they were not there."""
FROM_ANY_PAGE = {
    "text": ("Content-Type: text/plain",),
    "text that says it is JSON": ("Content-Type: text/plain; charset=application/json", "Origin: http://x"),
    "a form of parts": ("Content-Type: multipart/form-data; boundary=x",),
    "a form": ("Content-Type: application/x-www-form-urlencoded", "Origin: null"),
    "no type": ("Sec-Fetch-Site: cross-site",),
}
"""Browsers send these without asking the server first."""
UPGRADES = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    "websocket": "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AA==\r\nSec-WebSocket-Version: 13",
    "nobody knows what": "Connection: upgrade\r\nUpgrade: x/1",
    "nothing": "Connection: upgrade",
    "without a connection header": "Upgrade: h2c",
}
BAD_HEADERS = {
    "no colon": "X-None",
    "a blank before the colon": "X-Blank : x",
    "a blank in the name": "X Blank: x",
    "no name": ": x",
    "a NUL in the name": "X\0: x",
    "a NUL in the value": "X: a\0b",
    "a control character in the value": "X: a\x7fb",
    "a bare carriage return": "X: a\rY: b",
    "a bare line feed in the value": "X: a\n: b",
    "a line that goes on, at first": " folded: x",
    "a name in brackets": "(X): x",
    "a name that is not ASCII": "X\xe9: x",
    "a Transfer-Encoding that hides behind a blank": "Transfer-Encoding : chunked",
}
LENGTHS = ("-1", "+5", "5, 5", "5 5", "0x5", "1e3", "5.0", "x", "", "99999999999999999999", "18446744073709551616", "٥")
ENCODINGS = {
    "identity": ("identity", NOT_IMPLEMENTED),
    "gzip": ("gzip", NOT_IMPLEMENTED),
    "chunked, then identity": ("chunked, identity", BAD),
    "a name that begins like it": ("xchunked", NOT_IMPLEMENTED),
    "a name that ends like it": ("chunkedx", NOT_IMPLEMENTED),
    "quotes": ('"chunked"', NOT_IMPLEMENTED),
    "a control character": ("\x0bchunked", BAD),
}
BAD_CHUNKS = {
    "no size": b"\r\n" + BODY,
    "a negative size": b"-1\r\n" + BODY,
    "a size with a prefix": b"0x10\r\n" + BODY,
    "a size with a plus sign": b"+10\r\n" + BODY,
    "a size of 64 bits and more": b"10000000000000000\r\n" + BODY,
    "a size of 1,000 digits": b"1" * 1_000 + b"\r\n" + BODY,
    "letters for a size": b"xyz\r\n" + BODY,
    "a blank before the size": b" 10\r\n" + BODY,
    "no line break after the chunk": b"%x\r\n%bX" % (len(BODY), BODY) + END,
    "more than its size says": b"2\r\n" + BODY + b"\r\n" + END,
    "a NUL in an extension": b"%x;a=\0\r\n%b\r\n" % (len(BODY), BODY) + END,
    "a line feed alone": b"%x\n%b\n0\n\n" % (len(BODY), BODY),
}
"""Wrong bodies that follow a head which announces chunks."""
GARBAGE = {
    "NUL bytes": bytes(200),
    "0xff bytes": b"\xff" * 200,
    "a TLS hello": TLS_HELLO,
    "an HTTP/2 preface": HTTP2_PREFACE,
    "an SSH banner": b"SSH-2.0-OpenSSH_9.0\r\n",
    "a ZMTP greeting": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
    "an SMTP greeting": b"EHLO x\r\n",
    "a Redis command": b"*1\r\n$4\r\nPING\r\n",
    "a MongoDB message": bytes.fromhex("3a0000000100000000000000d40700000000000061646d696e2e24636d6400"),
    "a proxy's greeting": b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a binary proxy's greeting": b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c" + bytes(12),
    "JSON": BODY + b"\r\n\r\n",
    "a shell command": b"() { :;}; echo x\r\n\r\n",
    "a version of HTTP/1.2": head("GET", "/health", version="HTTP/1.2"),
    "a version of HTTP/99.99": head("GET", "/health", version="HTTP/99.99"),
    "another protocol's version": head("GET", "/health", version="ICY/1.1"),
    "lower case": head("get", "/health"),
    "an unknown method": head("NOBODY", "/health"),
    "a method of 10,000 letters": head("A" * 10_000, "/health"),
    "a tab": b"GET\t/health\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "a path with a blank": head("GET", "/he alth"),
    "a path with a NUL": head("GET", "/health\0"),
}
NOT_SPOKEN = {
    "no version": b"GET /health\r\n\r\n",
    "a version of HTTP/0.9": b"GET /health HTTP/0.9\r\n\r\n",
    "a version of HTTP/2.0": head("GET", "/health", version="HTTP/2.0"),
    "a path with a line feed": head("GET", "/health\nX: y"),
}
"""The parser takes these for requests of another version of HTTP."""
LENIENT = {"two blanks": head("GET ", "/health")}
"""The parser accepts these as requests."""


def head_cases() -> Iterator[HttpCase]:
    """Yields every case."""
    for table, allowed in ((GARBAGE, BAD), (NOT_SPOKEN, frozenset({505})), (LENIENT, EITHER)):
        for name, data in table.items():
            for at in (At.PROXY, At.DECODE):
                what = f"{at.value} gets {name}"
                yield HttpCase(what, (data,), allowed, closes=True, complete=False, method="GET", at=at)
    yield from _methods()
    yield from _paths()
    yield from _headers()
    yield from _framing()
    yield from _chunks()
    yield from _several()


def _methods() -> Iterator[HttpCase]:
    for path in (CHAT, TEXT, TOKENIZE, DETOKENIZE):
        for method in OTHER_METHODS:
            allowed = {"CONNECT": NOT_IMPLEMENTED, "OPTIONS": FINE}.get(method, frozenset({405}))
            yield HttpCase(f"{method} {path}", (head(method, path),), allowed, method=method, complete=False)
    for path in ("/health", "/metrics", "/v1/models", "/instances", "/version", "/ready"):
        yield HttpCase(f"POST {path}", (post(path, b"{}"),), frozenset({405}))
    # The framework decides its answer to a method that has no meaning here.
    for method in ("OPTIONS", "TRACE", "DELETE"):
        yield HttpCase(f"{method} /health", (head(method, "/health"),), frozenset({200, 405}), method=method)


def _paths() -> Iterator[HttpCase]:
    for name, (path, allowed) in PATHS.items():
        yield HttpCase(f"a path with {name}", (head("GET", path),), allowed, method="GET")
    for name, (path, allowed) in PATHS.items():
        if "health" not in path and len(path) < 1_000:
            yield HttpCase(f"a posted path with {name}", (post(path, BODY),), allowed | {405})
    long = (head("GET", "/" + "x" * 70_000),)
    yield HttpCase("a path of 70,000 bytes", long, TOO_LARGE, closes=True, complete=False, method="GET")
    yield HttpCase("a path that is escaped", (post("/v1/%63ompletions", body_with(TEXT, {})),), FINE | NOT_FOUND)


def _headers() -> Iterator[HttpCase]:
    for name, lines in ODD_HEADERS.items():
        yield HttpCase(f"headers: {name}", (post(TOKENIZE, BODY, lines),), FINE)
    for name, lines in UPGRADES.items():
        whole = post(TOKENIZE, BODY, lines)
        at = whole.index(b"\r\n\r\n") + 4
        yield HttpCase(f"an upgrade to {name}", (whole,), FINE)
        yield HttpCase(f"an upgrade to {name}, its body later", (whole[:at], whole[at:]), FINE)
        hidden = post(TOKENIZE, SMUGGLED, lines)
        at = hidden.index(b"\r\n\r\n") + 4
        yield HttpCase(f"an upgrade to {name}, a request as its body", (hidden[:at], hidden[at:]), BAD)
    for name, line in BAD_HEADERS.items():
        yield HttpCase(f"headers: {name}", (post(TOKENIZE, BODY, line),), BAD, closes=True, complete=False)
    for count, allowed in ((100, FINE), (129, TOO_LARGE), (10_000, TOO_LARGE)):
        lines = "\r\n".join(f"X-{i}: x" for i in range(count))
        yield HttpCase(
            f"{count} headers", (post(TOKENIZE, BODY, lines),), allowed, closes=count > 1_000, complete=False
        )
    for name, line in (("a header", "X: " + "x" * 70_000), ("a header's name", "X" * 70_000 + ": x")):
        case = (post(TOKENIZE, BODY, line),)
        yield HttpCase(f"{name} of 70,000 bytes", case, TOO_LARGE, closes=True, complete=False)
    yield HttpCase("no Host", (b"GET /health HTTP/1.1\r\n\r\n",), BAD, method="GET")
    yield HttpCase("two Hosts", (head("GET", "/health", "Host: a", "Host: b"),), BAD, complete=False, method="GET")
    for name, host in (("nothing", ""), ("a port alone", ":80"), ("another one", "elsewhere:99")):
        yield HttpCase(f"a Host of {name}", (head("GET", "/health", f"Host: {host}"),), EITHER, method="GET")
    packed = gzip.compress(BODY)
    for kind, data in (("gzip", packed), ("deflate", BODY), ("br", BODY), ("x", BODY)):
        case = (post(TOKENIZE, data, f"Content-Encoding: {kind}"),)
        yield HttpCase(f"a body in {kind}", case, frozenset({415}), complete=False)
    for name, fields in FROM_ANY_PAGE.items():
        sent = head("POST", TOKENIZE, f"Content-Length: {len(BODY)}", *fields) + BODY
        refused = 403 if any(field.startswith("Origin") for field in fields) else 415
        yield HttpCase(f"a page's body: {name}", (sent,), frozenset({refused}), complete=False)
    yield HttpCase("a body in identity", (post(TOKENIZE, BODY, "Content-Encoding: identity"),), FINE)
    yield HttpCase("HTTP/1.0", (head("GET", "/health", version="HTTP/1.0"),), FINE, method="GET")
    old = (b"GET /health HTTP/1.0\r\n\r\n",)
    yield HttpCase("HTTP/1.0 without a Host", old, FINE, method="GET")


def _framing() -> Iterator[HttpCase]:
    for length in LENGTHS:
        name = f"a Content-Length of {length!r}"
        whole = head("POST", TOKENIZE, f"Content-Length: {length}".encode().decode("latin-1")) + BODY
        # A length that is a number, but too large or otherwise unusable, gets its own answer.
        yield HttpCase(name, (whole,), frozenset({400, 413}), closes=True, complete=False)
    yield HttpCase("no Content-Length", (head("POST", TOKENIZE) + BODY,), BAD, complete=False)
    two = head("POST", TOKENIZE, LENGTH, LENGTH) + BODY
    yield HttpCase("the same Content-Length twice", (two,), EITHER, complete=False)
    for first, second in ((LENGTH, "Content-Length: 3"), ("Content-Length: 3", LENGTH)):
        whole = head("POST", TOKENIZE, first, second) + BODY
        yield HttpCase(f"two lengths, {first[16:]} and {second[16:]}", (whole,), BAD, closes=True, complete=False)
    for first, second in ((LENGTH, CHUNKED), (CHUNKED, LENGTH)):
        whole = head("POST", TOKENIZE, first, second) + ONE_CHUNK + END
        yield HttpCase(f"a length and chunks, {first[:8]} first", (whole,), BAD, closes=True, complete=False)
    for name, (coding, allowed) in ENCODINGS.items():
        whole = head("POST", TOKENIZE, f"Transfer-Encoding: {coding}") + ONE_CHUNK + END
        yield HttpCase(f"a transfer encoding of {name}", (whole,), allowed, closes=True, complete=False)
    twice = head("POST", TOKENIZE, CHUNKED, CHUNKED) + ONE_CHUNK + END
    yield HttpCase("chunks announced twice", (twice,), EITHER, closes=True, complete=False)
    old = head("POST", TOKENIZE, CHUNKED, version="HTTP/1.0") + ONE_CHUNK + END
    yield HttpCase("chunks in HTTP/1.0", (old,), EITHER, closes=True, complete=False)
    short = post(TOKENIZE, BODY)[:-1] + b"}" + SMUGGLED
    yield HttpCase("a request behind the body", (short,), FINE, complete=False)
    yield HttpCase("a length that is too short", (post(TOKENIZE, BODY + b"\r\n")[:-2] + SMUGGLED,), BAD, complete=False)
    large = frozenset({413})
    for size in (8 * 2**20 + 1, 2**31, 2**63 - 1):
        whole = head("POST", TOKENIZE, f"Content-Length: {size}") + b"{"
        yield HttpCase(f"{size} bytes announced", (whole,), large, complete=False)
    for expectation, allowed in (("100-continue", FINE), ("200-ok", frozenset({200, 400, 417}))):
        whole = post(TOKENIZE, BODY, f"Expect: {expectation}")
        at = whole.index(b"\r\n\r\n") + 4
        yield HttpCase(f"an expectation of {expectation}", (whole[:at], whole[at:]), allowed)
    refused = head("POST", TOKENIZE, "Expect: 100-continue", f"Content-Length: {2**40}")
    yield HttpCase("an expectation, and 1 TiB", (refused,), large, complete=False)
    yield HttpCase(
        "an expectation without a body", (head("GET", "/health", "Expect: 100-continue"),), FINE, method="GET"
    )
    yield HttpCase("a GET with a body", (head("GET", "/health", LENGTH) + BODY,), FINE, method="GET")
    yield HttpCase("lines before the request", (b"\r\n\r\n" + post(TOKENIZE, BODY),), FINE)
    yield HttpCase("lines behind the request", (post(TOKENIZE, BODY) + b"\r\n\r\n",), FINE)
    feeds = post(TOKENIZE, BODY).replace(b"\r\n", b"\n")
    yield HttpCase("line feeds alone", (feeds,), EITHER, closes=True, complete=False)


def _chunks() -> Iterator[HttpCase]:
    announced = head("POST", TOKENIZE, "Content-Type: application/json", CHUNKED)
    yield HttpCase("chunks", (announced + ONE_CHUNK + END,), FINE)
    single = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    yield HttpCase("chunks of one byte", (announced + single + END,), FINE)
    yield HttpCase("chunks, each in a packet", (announced, ONE_CHUNK, END), FINE)
    extended = b'%x;a=b;c="d"\r\n%b\r\n' % (len(BODY), BODY)
    yield HttpCase("chunks with extensions", (announced + extended + END,), FINE)
    trailers = b"0\r\nContent-Length: 5\r\nTransfer-Encoding: x\r\nX-Pdserve-Ticket: x\r\nHost: y\r\n\r\n"
    yield HttpCase("trailers that are headers", (announced + ONE_CHUNK + trailers,), EITHER, complete=False)
    for name, data in BAD_CHUNKS.items():
        yield HttpCase(f"chunks: {name}", (announced + data,), BAD, closes=True, complete=False)
    for name, data in (
        ("an extension of 1 MiB", b"%x;%b\r\n%b\r\n" % (len(BODY), b"a" * 2**20, BODY) + END),
        ("a trailer of 1 MiB", ONE_CHUNK + b"0\r\nX: " + b"x" * 2**20 + b"\r\n\r\n"),
        ("200,000 trailers", ONE_CHUNK + b"0\r\n" + b"X: y\r\n" * 200_000 + b"\r\n"),
    ):
        yield HttpCase(f"chunks: {name}", (announced + data,), TOO_LARGE, closes=True, complete=False)
    endless = b"".join(b"%x\r\n%b\r\n" % (2**20, b" " * 2**20) for _ in range(9))
    yield HttpCase("chunks of 9 MiB", (announced + endless,), frozenset({413}), complete=False)
    hidden = b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED)
    yield HttpCase("a request in a chunk", (announced + hidden + END,), BAD)


def _several() -> Iterator[HttpCase]:
    """Yields several requests at once. The server answers the first one, and may answer the others."""
    asked = head("GET", "/version")
    yield HttpCase("two requests at once", (asked * 2,), FINE, method="GET", complete=False)
    yield HttpCase("a thousand requests at once", (asked * 1_000,), FINE, method="GET", complete=False)
    yield HttpCase("a request and rubbish", (asked + b"\xff" * 1_000,), FINE, method="GET", complete=False)
    whole = post(TOKENIZE, BODY)
    yield HttpCase("byte by byte", tuple(bytes((byte,)) for byte in whole), FINE)
    yield HttpCase("a break in every line", tuple(line + b"\n" for line in asked.split(b"\n")[:-1]), FINE, method="GET")
