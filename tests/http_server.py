"""A small HTTP server whose faults the tests choose."""

from __future__ import annotations

import threading
import time
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
    stalls : list of float
        The next answers then wait this many seconds.
    statuses : list of int
        The next answers are these errors.
    length : bool
        Whether answers tell their length.
    asked : list
        (name, User-Agent) of every request.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.cuts: list[int] = []
        self.stalls: list[float] = []
        self.statuses: list[int] = []
        self.length = True
        self.asked: list[tuple[str, str]] = []
        self.address = ""


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Served]:
    """Serve files until the block ends."""
    served = Served(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            served.asked.append((name, self.headers["User-Agent"]))
            if served.statuses:
                self.send_error(served.statuses.pop(0))
                return
            if name not in served.files:
                self.send_error(404)
                return
            content = served.files[name]
            self.send_response(200)
            if served.length:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            cut = served.cuts.pop(0) if served.cuts else -1
            self.wfile.write(content if cut < 0 else content[:cut])
            self.wfile.flush()
            time.sleep(served.stalls.pop(0) if served.stalls else 0)

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
