"""
epd-proxy over httpx's own transport in place of its pool, and otherwise as ``serve`` runs it.

    python -m perf.bare_httpx --port PORT --encode URLS --prefill URLS --decode URLS
"""

from __future__ import annotations

import argparse

import httpx
import uvicorn

from epd_proxy import Config, EPDProxy


def proxy_for(encode: str, prefill: str, decode: str) -> EPDProxy:
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.5
    )
    transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)
    return EPDProxy(
        config=Config(encode=encode, prefill=prefill, decode=decode), transport=transport
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.bare_httpx")
    parser.add_argument("--port", type=int, required=True)
    for role in ("encode", "prefill", "decode"):
        parser.add_argument(f"--{role}", default="none")
    options = parser.parse_args()
    uvicorn.run(
        proxy_for(options.encode, options.prefill, options.decode),
        host="127.0.0.1",
        port=options.port,
        server_header=False,
        date_header=False,
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
