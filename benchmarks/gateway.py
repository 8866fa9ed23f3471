"""Added latency and throughput of the gateway, in front of a pretended engine on loopback.

Three processes: the engine (answers at once), the gateway, and this one as the client. The added
latency is the gateway's time minus the engine's own, both as this client sees them, one request at
a time and at a fixed rate. On a machine whose cores others use, figures are upper bounds.

    python benchmarks/gateway.py --seconds 5

Prints one JSON document: the figures, the load of the machine, the command and the commit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from served import free_port

WORDS = 32  # chunks of a stream


def body(*, stream: bool) -> dict[str, object]:
    message = {"role": "user", "content": "Say something of medium length, please."}
    return {"model": "fake", "messages": [message], "max_tokens": WORDS, "stream": stream}


def run_engine(port: int) -> None:
    import uvicorn

    from outrider.testing.engine import FakeEngine

    uvicorn.run(
        FakeEngine(), host="127.0.0.1", port=port, log_level="error", access_log=False, http="h11"
    )


def run_gateway(engine: int, port: int, admin: int, folder: str) -> None:
    import logging

    from outrider.rollout.config import make_rollout
    from outrider.serve.gateway.run import serve_rollout

    logging.disable(logging.WARNING)
    backend = {"engine": "openai", "url": f"http://127.0.0.1:{engine}"}
    config = make_rollout(
        {
            "target": "fake",
            "profiles": {
                "baseline": {"speculative": False, "backend": backend},
                "spec": {
                    "speculative": True,
                    "method": "eagle3",
                    "rollout": "5%",
                    "backend": backend,
                },
            },
            "state": folder,
            "port": port,
            "admin_port": admin,
        }
    )
    asyncio.run(serve_rollout(config, source=None, embedded=None, listening=lambda address: None))


@contextlib.contextmanager
def processes() -> Iterator[tuple[str, str, int]]:
    """The engine's address, the gateway's, and the gateway's process."""
    engine, port, admin = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        started = [
            spawn.Process(target=run_engine, args=(engine,), daemon=True),
            spawn.Process(target=run_gateway, args=(engine, port, admin, folder), daemon=True),
        ]
        for process in started:
            process.start()
        try:
            for at in (engine, port):
                wait_for(at)
            yield f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{port}", started[1].pid or 0
        finally:
            for process in started:
                process.terminate()
                process.join(10)


def wait_for(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise SystemExit(f"port {port} never listened")


async def once(session: aiohttp.ClientSession, root: str, *, stream: bool) -> float:
    """Seconds to the first byte of the answer's body; the rest is read as well."""
    begin = time.perf_counter()
    url = f"{root}/v1/chat/completions"
    async with session.post(url, json=body(stream=stream)) as answer:
        assert answer.status == 200, await answer.text()
        await answer.content.readany()
        first = time.perf_counter() - begin
        await answer.read()
    return first


async def one_client(root: str, seconds: float, *, stream: bool) -> list[float]:
    async with aiohttp.ClientSession() as session:
        found = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            found.append(await once(session, root, stream=stream))
    return found[len(found) // 10 :]


async def at_rate(root: str, seconds: float, rate: float) -> list[float]:
    """Requests at a fixed rate, whatever becomes of earlier ones."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begin, tasks = time.perf_counter(), []
        for number in range(int(seconds * rate)):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(once(session, root, stream=False)))
        return list(await asyncio.gather(*tasks))


async def throughput(root: str, seconds: float, *, stream: bool, clients: int = 16) -> float:
    """Requests per second with so many clients."""
    done = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        end = time.perf_counter() + seconds

        async def client() -> None:
            nonlocal done
            while time.perf_counter() < end:
                await once(session, root, stream=stream)
                done += 1

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return done / (time.perf_counter() - begin)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


async def measure(seconds: float, engine: str, gateway: str, pid: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for stream in (False, True):
        kind = "stream" if stream else "whole"
        direct = await one_client(engine, seconds, stream=stream)
        through = await one_client(gateway, seconds, stream=stream)
        added = statistics.median(through) - statistics.median(direct)
        found[f"added_p50_ms_{kind}"] = round(added * 1000, 3)
    direct, through = [await at_rate(root, seconds, 200) for root in (engine, gateway)]
    found["added_p99_ms_at_200"] = round(
        (quantile(through, 0.99) - quantile(direct, 0.99)) * 1000, 3
    )
    for stream in (False, True):
        before, begin = cpu_seconds(pid), time.perf_counter()
        rate = await throughput(gateway, seconds, stream=stream)
        used = cpu_seconds(pid) - before
        requests = rate * (time.perf_counter() - begin)
        kind = "stream" if stream else "whole"
        found[f"requests_per_s_{kind}"] = round(rate, 1)
        found[f"cpu_ms_per_request_{kind}"] = round(used / requests * 1000, 3)
        found[f"requests_per_core_second_{kind}"] = round(requests / used, 1)
        if stream:
            found["chunks_per_core_second"] = round(requests * (WORDS + 3) / used)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="per figure")
    seconds = parser.parse_args().seconds
    with processes() as (engine, gateway, pid):
        found = asyncio.run(measure(seconds, engine, gateway, pid))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {"load": os.getloadavg(), "cores": os.cpu_count(), "python": sys.version.split()[0]}
    print(json.dumps({**found, **about, "seconds": seconds, "commit": commit}, indent=2))


if __name__ == "__main__":
    main()
