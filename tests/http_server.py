"""A small HTTP server whose faults the tests choose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Served:
    """What a server gives, and what it was asked.

    Attributes
    ----------
    files : dict
        Content by name.
    cuts : list of int
        The next answers break off after so many bytes; -1 answers whole.
    statuses : list of int
        The next answers are these errors.
    ranges : bool
        Whether a part of a file can be asked for.
    asked : list
        (name, Range header) of every request.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.ranges = True
        self.length = True
        self.asked: list[tuple[str, str | None]] = []
        self.address = ""


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Served]:
    """Serve files until the block ends."""
    served = Served(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, asked = self.path.lstrip("/"), self.headers.get("Range")
            served.asked.append((name, asked))
            if served.statuses:
                self.send_error(served.statuses.pop(0))
                return
            if name not in served.files:
                self.send_error(404)
                return
            content = served.files[name]
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and served.ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if served.length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            cut = served.cuts.pop(0) if served.cuts else -1
            self.wfile.write(content[start:] if cut < 0 else content[start : start + cut])

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
