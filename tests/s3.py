"""An S3 server for the tests (moto's), and a proxy in front of it that has faults on demand."""

import http.client
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from moto.server import ThreadedMotoServer

THROTTLED = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass
class Fault:
    """What befalls requests whose `METHOD path` matches: `times` of them, after `after` that go well."""

    # Answer 503 or 403; close the connection before the request is carried out, or after it with half of the answer or,
    # where that has no body, none; or answer late.
    kind: Literal["throttle", "deny", "drop", "cut", "slow"]
    pattern: str
    times: int = 1 << 30
    after: int = 0
    seconds: float = 0.0
    num_met: int = 0


@dataclass
class FaultyS3:
    """A server at `url`; faults are met in the order of `faults`."""

    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def having(self, *faults: Fault) -> Iterator[None]:
        """The faults for as long as the block lasts; asserts that each was met."""
        self.faults = list(faults)
        try:
            yield
        finally:
            self.faults = []
        assert all(fault.num_met for fault in faults), faults

    def next_fault(self, request: str) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if re.search(fault.pattern, request):
                    if fault.after:
                        fault.after -= 1
                    elif fault.num_met < fault.times:
                        fault.num_met += 1
                        return fault
        return None


@contextmanager
def serving() -> Iterator[FaultyS3]:
    """Moto's server behind the proxy, both on free ports of this machine."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    behind = moto.get_host_and_port()
    s3 = FaultyS3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = s3.next_fault(f"{self.command} {self.path}")
            kind = fault.kind if fault is not None else None
            if fault is not None and kind == "slow":
                time.sleep(fault.seconds)
            if kind == "drop":
                self.close_connection = True
            elif kind in ("throttle", "deny"):
                self._answer(*((503, THROTTLED) if kind == "throttle" else (403, DENIED)))
            else:
                self._forward(body, is_cut=kind == "cut")

        def _forward(self, body: bytes, is_cut: bool) -> None:
            connection = http.client.HTTPConnection(*behind, timeout=60)
            try:
                headers = {name: value for name, value in self.headers.items() if name != "Host"}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
                self.close_connection = is_cut
                if is_cut and not data:
                    return
                self.send_response_only(answer.status)
                dropped = {"connection", "transfer-encoding"} | ({"content-length"} if data else set())
                for name, value in answer.getheaders():
                    if name.lower() not in dropped:
                        self.send_header(name, value)
                if data:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if is_cut else data)
            finally:
                connection.close()

        def _answer(self, status: int, data: bytes) -> None:
            self.send_response_only(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

        def log_message(self, *_: object) -> None:
            """Nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    s3.url = f"http://127.0.0.1:{proxy.server_address[1]}"
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield s3
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
        moto.stop()
