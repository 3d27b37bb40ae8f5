"""An HTTP server that does everything servers do wrong, on demand."""

from __future__ import annotations

import gzip
import hashlib
import random
import socket
import struct
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Files by name. `mischief[name]` is a list of what goes wrong with the next requests for it, in order."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.mischief: dict[str, list[Any]] = {}
        self.requests: list[tuple[str, str | None]] = []
        """(name, Range header) of every request."""
        self.login = ""
        self.logins: list[str | None] = []
        """The Authorization header that is asked for, if any, and that of every request."""
        self.times: list[float] = []

    def add(self, name: str, size: int = 5000, *mischief: Any) -> dict[str, Any]:
        """An entry for the manifest."""
        content = self.contents[name] = random.Random(name).randbytes(size)
        self.mischief[name] = list(mischief)
        url = f"http://127.0.0.1:{self.server_port}/{name}"
        return {"url": url, "size": size, "sha256": hashlib.sha256(content).hexdigest()}

    def ranges(self, name: str) -> list[str | None]:
        return [asked for requested, asked in self.requests if requested == name]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that go away are part of the game


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name, asked = self.path.lstrip("/").partition("?")[0], self.headers.get("Range")
        self.server.requests.append((name, asked))
        self.server.times.append(time.monotonic())
        self.server.logins.append(self.headers.get("Authorization"))
        if self.server.login and self.server.logins[-1] != self.server.login:
            self.answer(401)
            return
        if name not in self.server.contents:
            self.answer(404)
            return
        content, queue = self.server.contents[name], self.server.mischief[name]
        what, *details = queue.pop(0) if queue else ("good",)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        etag = self.server.etags.get(name)
        if (self.headers.get("If-Range") not in (None, etag) and what != "ignores if-range") or what == "ignores range":
            start = 0
        if start > len(content):
            what, details = "status", [416]
        if what == "status":
            self.answer(details[0], **(details[1] if len(details) > 1 else {}))
        elif what == "redirect":
            self.answer(302, Location=details[0] if ":" in details[0] else f"/{details[0]}")
        elif what == "packed":
            self.answer(200, gzip.compress(content, mtime=0), Content_Encoding=details[0])
        elif what == "labelled":
            self.answer(200, content, Content_Encoding=details[0])
        elif what == "wrong content":
            self.send(bytes(len(content)), 0)
        elif what == "other file":
            self.send(b"<html>sorry</html>", 0)
        elif what == "wrong range":
            self.answer(206, b"xxxx", Content_Range=f"bytes {start + 1}-{len(content) - 1}/{len(content)}")
        elif what == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (content[:100], content[100:]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if details != ["cut"]:
                self.wfile.write(b"0\r\n\r\n")
        elif what == "drip":
            self.send_response(200)
            self.flush_headers()
            while True:
                self.wfile.write(b"X")
                time.sleep(0.02)
        elif what == "endless redirect":
            self.send_response(302)
            self.send_header("Location", f"/{details[0]}")
            self.end_headers()
            while True:
                self.wfile.write(bytes(2**16))
        elif what == "trickle":
            self.send(content, 0, 1)
            for number in range(1, len(content)):
                self.wfile.write(content[number : number + 1])
                time.sleep(0.02)
        elif what == "no length":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)
        else:
            limit = {"truncated": details, "reset": details, "slow": details}.get(what, [len(content)])[0]
            self.send(content, start, start + limit, etag=etag)
            if what == "slow":
                time.sleep(1.0)
            if what == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def send(self, content: bytes, start: int, stop: int | None = None, etag: str | None = None) -> None:
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if etag:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:stop])
        self.wfile.flush()

    def end_headers(self) -> None:
        self.send_header("Connection", "close")  # else a client may ask again on a connection that is being closed
        super().end_headers()

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
