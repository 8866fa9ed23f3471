"""A server of one canned answer, to find out how fast the load generator is. Standard library only.

Run as ``python -m outrider.evaluate.echo``; it prints its address and answers until it is ended.
It reads requests by their Content-Length and looks no further.
"""

from __future__ import annotations

import asyncio

TOKENS = 8
_EVENT = b'data: {"model":"echo","choices":[{"index":0,"text":"word ","finish_reason":%s}]}\n\n'
_USAGE = (
    b'data: {"model":"echo","choices":[],"usage":'
    b'{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (TOKENS, TOKENS + 1)
)
_BODY = _EVENT % b"null" * (TOKENS - 1) + _EVENT % b'"stop"' + _USAGE + b"data: [DONE]\n\n"
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class Echo(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            whole = end + 4 + _length(self._data[:end])
            if len(self._data) < whole:
                return
            self._data = self._data[whole:]
            self._transport.write(ANSWER)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


async def main() -> None:
    """Serve on a free port of this machine."""
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
