"""HTTP as uvicorn speaks it on httptools, with a bound that httptools lacks.

llhttp, the parser in httptools, takes a head of any size, one field after another or one field
without end, and uvicorn keeps what it finds. Here what arrives and becomes neither a head nor a
piece of a body nor the end of a message is counted, and a connection on which that grows too large
is answered 431 and closed. Heads that are whole and too large are refused by the application.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outrider.serve.errors import headers_too_large
from outrider.serve.wire import JSON, encode_json


class BoundedHttp(HttpToolsProtocol):
    """One connection. The bound is uvicorn's `h11_max_incomplete_event_size`, in bytes."""

    _unread = 0  # bytes since the last head, piece of a body or end of a message

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        bound = self.config.h11_max_incomplete_event_size
        if bound is not None and self._unread > bound and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        """Close; with an answer where none is under way."""
        if self.cycle is None or self.cycle.response_complete:
            error = headers_too_large()
            body = encode_json(error.body())
            head = f"content-type: {JSON}\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n\r\n" + body)
        self.transport.close()
