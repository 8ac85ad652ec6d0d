from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from epd_proxy import ConfigError
from epd_proxy.servers import check, listen

APP = PlainTextResponse("hello")
FREE: dict[str, Any] = {"host": "127.0.0.1", "port": 0}


def option_refused(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check(APP, options)
    return caught.value.option


def test_what_can_be_served_is_not_refused(tmp_path: Path) -> None:
    check(APP, FREE)
    check(APP, {**FREE, "uds": str(tmp_path / "socket")})


@pytest.mark.parametrize("host", ["", "10.255.255.1.9", "192.0.2.1", "no such host"])
def test_a_host_that_is_not_ours_is_refused(host: str) -> None:
    assert option_refused({"host": host, "port": 0}) == "--host"


def test_a_port_that_is_taken_is_refused() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert option_refused({"host": "127.0.0.1", "port": port}) == "--port"


def test_a_socket_in_a_directory_that_is_not_there_is_refused() -> None:
    assert option_refused({**FREE, "uds": "/nowhere/socket"}) == "--uds"


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_certfile", "ssl_ca_certs"])
def test_a_file_that_is_not_there_is_refused(name: str) -> None:
    assert option_refused({**FREE, name: "/nowhere.pem"}) == "--" + name.replace("_", "-")


def test_a_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("")
    assert option_refused({**FREE, "ssl_keyfile": str(key)}) == "--ssl-certfile"


def test_a_file_that_holds_no_certificate_is_refused(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.write_text("no certificate")
    assert option_refused({**FREE, "ssl_certfile": str(certificate)}) == "--ssl-certfile"
