"""
``epd-proxy serve`` in front of ``epd-proxy simulate``, all of them processes.
"""

from __future__ import annotations

import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from tests.driver import CHAT
from tests.e2e.test_openai_client import ANSWER, PICTURE, QUESTION, messages
from tests.processes import LIMIT, listening, running, unused_address

TOPOLOGIES = {
    "E+PD": {"encode": "encode", "decode": "prefill_decode"},
    "E+P+D": {"encode": "encode", "prefill": "prefill", "decode": "decode"},
    "PD": {"decode": "prefill_decode"},
    "P+D": {"prefill": "prefill", "decode": "decode"},
}


@pytest.fixture(scope="module", params=TOPOLOGIES)
def url(request: pytest.FixtureRequest, engines: dict[str, str]) -> Iterator[str]:
    roles = TOPOLOGIES[request.param]
    flags = [word for role, kind in roles.items() for word in (f"--{role}", engines[kind])]
    with listening("serve", *flags) as address:
        yield address


@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_goes_through(url: str, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = messages(PICTURE, QUESTION)
        if stream:
            chunks = client.chat.completions.create(model="m", messages=asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            answer = client.chat.completions.create(model="m", messages=asked)
            text = answer.choices[0].message.content or ""
    assert text.startswith((ANSWER, "I was given 1 image"))


def test_health_models_and_strangers_are_answered(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/live").json() == {"proxy": "healthy"}
        assert client.head("/health").content == b""
        assert client.get("/v1/models").json()["object"] == "list"
        assert client.get("/metrics").json()["error"]["code"] == 404
        assert client.get(CHAT).headers["allow"] == "POST"


def test_the_servers_own_headers_are_decodes(url: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(url + CHAT, json=body, headers={"x-request-id": "r1"}, trust_env=False)
    names = [name for name, _ in answer.headers.multi_items()]
    assert len(names) == len(set(names))
    assert answer.headers["server"] == "uvicorn"
    assert answer.headers["x-request-id"] == "r1"


def test_an_engine_that_is_not_there_is_a_502(engines: dict[str, str]) -> None:
    with unused_address() as nobody, listening("serve", "--decode", nobody) as url:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        answer = httpx.post(url + CHAT, json=body, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["stage"]) == (502, "decode")
        assert httpx.get(url + "/health", trust_env=False).status_code == 503


def test_ctrl_c_in_a_stream_lets_it_end_whole() -> None:
    slow = ["simulate", "--role", "prefill_decode", "--latency-ms", "1000", "--chunks", "12"]
    with (
        listening(*slow) as engine,
        running("serve", "--decode", engine, "--port", "0") as process,
    ):
        url = process.wait_for(r"running on (\S+)")[1]
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=LIMIT, trust_env=False) as answer:
            chunks = answer.iter_bytes()
            received = next(chunks)
            process.signal(signal.SIGINT)
            process.wait_for("Shutting down")
            received += b"".join(chunks)
        assert received.endswith(b"data: [DONE]\n\n")
        assert process.wait() == 0
        assert "Traceback" not in process.output


def test_terminating_the_demo_ends_it() -> None:
    with running("demo", "--port", "0") as process:
        process.wait_for("Ctrl-C ends it")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "Traceback" not in process.output


def test_it_listens_with_tls_where_it_is_told(engines: dict[str, str], tmp_path: Path) -> None:
    authority = trustme.CA()
    identity = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(b"".join(each.bytes() for each in identity.cert_chain_pems))
    identity.private_key_pem.write_to_path(str(key))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    files = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with listening("serve", "--decode", engines["prefill_decode"], *files) as url:
        assert url.startswith("https://")
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(url + CHAT, json=body, verify=trusting, trust_env=False)
        assert answer.json()["object"] == "chat.completion"


def test_it_listens_on_a_unix_socket_where_it_is_told(
    engines: dict[str, str], tmp_path: Path
) -> None:
    path = str(tmp_path / "proxy.sock")
    with running("serve", "--decode", engines["prefill_decode"], "--uds", path) as process:
        process.wait_for("running on unix socket")
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            assert client.get("http://proxy/health").status_code == 200


def test_the_demo_listens_on_ipv6_too() -> None:
    with running("demo", "--once", "--host", "::1", "--port", "0") as process:
        process.wait_for(r"^epd-proxy at http://\[::1\]:\d+$")
        process.wait_for("I was given 1 image")
        assert process.wait() == 0
