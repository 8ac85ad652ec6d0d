from __future__ import annotations

import pickle
import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn

import epd_proxy
from epd_proxy import Config, cli, demo
from epd_proxy.config import flag_name
from epd_proxy.workers import Service
from tests.processes import running

DECODE = ["--decode", "http://d:8000"]


class Served:
    """What ``serve`` would have handed to uvicorn."""

    app: Any
    options: dict[str, Any]
    config: Config
    service: Service
    workers: int

    def __call__(self, app: Any, **options: Any) -> None:
        self.app = app
        self.options = options

    def run(self, service: Service, workers: int) -> int:
        self.app, self.service, self.workers = None, service, workers
        self.config, self.options = service.config, dict(service.options)
        return 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    seen = Served()
    monkeypatch.setattr(uvicorn, "run", seen)
    monkeypatch.setattr(cli, "run", seen.run)
    monkeypatch.setattr(cli, "check", lambda app, options: None)
    return seen


def urls(instances: Any) -> list[str]:
    return [instance.url for instance in instances]


def test_vllms_flags_mean_the_same(served: Served) -> None:
    line = (
        "serve --host 0.0.0.0 --port 8001 --encode-servers-urls http://e1:1,http://e2:1"
        " --prefill-servers-urls disable --decode-servers-urls http://d:1"
        " --decode-retries 3 --no-rewrite --log-requests"
    )
    assert cli.main(line.split()) == 0
    config = served.config
    assert urls(config.encode) == ["http://e1:1", "http://e2:1"]
    assert urls(config.prefill) == []
    assert urls(config.decode) == ["http://d:1"]
    assert (config.decode_retries, config.no_rewrite, config.log_requests) == (3, True, True)
    assert (served.options["host"], served.options["port"]) == ("0.0.0.0", 8001)


def test_the_short_flags_repeat_and_take_lists_and_weights(served: Served) -> None:
    line = (
        "serve --encode http://a,http://b=3 --encode http://c --prefill http://p --decode http://d"
    )
    assert cli.main(line.split()) == 0
    found = [(one.url, one.weight) for one in served.config.encode]
    assert found == [("http://a", 1), ("http://b", 3), ("http://c", 1)]
    assert urls(served.config.prefill) == ["http://p"]


def test_every_field_of_the_config_is_a_flag(served: Served, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k")
    values = {
        "encode": "http://e",
        "prefill": "none",
        "decode": "http://d",
        "encode_selector": "weighted",
        "prefill_selector": "random",
        "decode_selector": "random",
        "encoder_batch_size": "4",
        "connect_timeout": "0.5",
        "keep_alive": "1.5",
        "max_connections": "7",
        "pool_timeout": "2.5",
        "probe_timeout": "1.5",
        "max_body_size": "64KiB",
        "encode_max_tokens": "1",
        "metadata_format": "tensor",
        "ec_consumer_zmq_addrs": "tcp://a:1,tcp://b:1",
        "ec_consumer_dp_size": "2",
        "kv_connector": "shared",
        "kv_remote_host_from_url": None,
        "decode_retries": "2",
        "encode_retries": "3",
        "encode_fallback": "none",
        "stream_guard": "2.5",
        "api_key": "a,b",
        "api_key_file": str(keys),
        "upstream_api_key": "up",
        "media_ids": "tenant",
        "media_ids_secret": "hush",
        "allowed_media_schemes": "https,data",
        "allowed_media_hosts": "Media.example.",
        "trust_transfer_params": None,
        "expose_topology": None,
        "encode_timeout": "90",
        "prefill_timeout": "60.5",
        "first_byte_timeout": "30",
        "idle_timeout": "20",
        "body_timeout": "10",
        "max_concurrency": "8",
        "max_queue": "9",
        "queue_timeout": "3",
        "admin_api_key": "secret",
        "profile_api_key": "bearer",
        "no_rewrite": None,
        "trust_embeds": None,
        "log_requests": None,
        "dynamic_registration": None,
        "registry": "redis://127.0.0.1:1/0",
        "allowed_instance_networks": "10.0.0.0/8",
        "drain_timeout": "5",
        "wait_for_ready": "1",
        "probe_interval": "7",
        "fail_threshold": "2",
        "evicted_ttl": "60",
    }
    assert values.keys() == {field.name for field in msgspec.structs.fields(Config)}
    line = [word for name, value in values.items() for word in (flag_name(name), value) if word]
    assert cli.main(["serve", *line]) == 0
    config = served.config
    assert [config.encode_selector, config.prefill_selector] == ["weighted", "random"]
    assert (config.encoder_batch_size, config.decode_retries) == (4, 2)
    assert (config.connect_timeout, config.probe_timeout) == (0.5, 1.5)
    assert (config.keep_alive, config.max_connections, config.pool_timeout) == (1.5, 7, 2.5)
    assert config.max_body_size == 65536
    assert config.no_rewrite
    assert config.trust_embeds
    assert config.kv_remote_host_from_url
    assert (config.kv_connector, config.metadata_format) == ("shared", "tensor")
    assert config.ec_consumer_zmq_addrs == ("tcp://a:1", "tcp://b:1")
    assert (config.ec_consumer_dp_size, config.encode_max_tokens) == (2, 1)
    assert (config.admin_api_key, config.profile_api_key) == ("secret", "bearer")
    assert (config.encode_retries, config.encode_fallback, config.stream_guard) == (3, "none", 2.5)
    assert (config.api_key, config.api_key_file) == (("a,b",), str(keys))
    assert config.upstream_api_key == "up"
    assert (config.media_ids, config.media_ids_secret) == ("tenant", "hush")
    assert config.allowed_media_schemes == ("https", "data")
    assert config.allowed_media_hosts == ("media.example",)
    assert config.trust_transfer_params
    assert config.expose_topology
    assert (config.encode_timeout, config.prefill_timeout) == (90, 60.5)
    assert (config.first_byte_timeout, config.idle_timeout, config.body_timeout) == (30, 20, 10)
    assert (config.max_concurrency, config.max_queue, config.queue_timeout) == (8, 9, 3)


def test_keys_of_callers_repeat_and_may_hold_commas(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["serve", *DECODE, "--api-key", "a,b", "--api-key", "c"]) == 0
    assert list(served.config.api_key) == ["a,b", "c"]
    monkeypatch.setenv("EPD_PROXY_API_KEY", "d,e")
    assert cli.main(["serve", *DECODE]) == 0
    assert list(served.config.api_key) == ["d,e"]


def test_by_default_it_listens_on_loopback_and_says_nothing_of_its_own(served: Served) -> None:
    assert cli.main(["serve", *DECODE]) == 0
    options = served.options
    assert options["host"] == "127.0.0.1"
    settings = served.service._replace(options={}).settings(None)
    assert not settings.server_header
    assert not settings.date_header
    assert not settings.access_log
    assert served.workers == 1
    assert options["log_config"]["loggers"]["epd_proxy"]["level"] == "INFO"
    assert served.config == Config(decode="http://d:8000")


def test_uvicorns_own_flags_are_passed_through(served: Served) -> None:
    line = "--uds /tmp/s --log-level debug --ssl-keyfile k --ssl-certfile c --ssl-ciphers x"
    assert cli.main(["serve", *DECODE, *line.split()]) == 0
    assert served.options["uds"] == "/tmp/s"
    assert served.options["log_level"] == "debug"
    assert {name: served.options[f"ssl_{name}"] for name in ("keyfile", "certfile", "ciphers")} == {
        "keyfile": "k",
        "certfile": "c",
        "ciphers": "x",
    }
    assert served.options["log_config"]["loggers"]["epd_proxy"]["level"] == "DEBUG"


FILE = """
host = "127.0.0.3"
decode_retries = 7
encoder_batch_size = 7
connect_timeout = 7
no_rewrite = true
max_body_size = "7KiB"
log_level = "warning"
prefill = "http://p1, http://p2"

[[encode]]
url = "http://e1"
weight = 3

[[encode]]
url = "http://e2"

[[decode]]
url = "http://d"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "proxy.toml"
    path.write_text(FILE)
    return str(path)


def test_a_file_holds_the_flags_with_underscores_and_tables_of_instances(
    served: Served, file: str
) -> None:
    assert cli.main(["serve", "--config", file]) == 0
    config = served.config
    assert [(one.url, one.weight) for one in config.encode] == [("http://e1", 3), ("http://e2", 1)]
    assert urls(config.prefill) == ["http://p1", "http://p2"]
    assert (config.decode_retries, config.connect_timeout, config.no_rewrite) == (7, 7.0, True)
    assert config.max_body_size == 7 << 10
    assert served.options["host"] == "127.0.0.3"
    assert served.options["log_level"] == "warning"


def test_a_value_comes_from_the_flag_then_our_variable_then_vllms_then_the_file(
    served: Served, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_PROXY_CONFIG", file)
    assert cli.main(["serve"]) == 0
    assert served.config.encoder_batch_size == 7
    monkeypatch.setenv("ENCODER_MAX_BATCH_SIZE", "6")
    assert cli.main(["serve"]) == 0
    assert served.config.encoder_batch_size == 6
    monkeypatch.setenv("EPD_PROXY_ENCODER_BATCH_SIZE", "5")
    assert cli.main(["serve"]) == 0
    assert served.config.encoder_batch_size == 5
    assert cli.main(["serve", "--encoder-batch-size", "4"]) == 0
    assert served.config.encoder_batch_size == 4
    assert served.config.decode_retries == 7


def test_the_environment_has_comma_lists_switches_and_ports(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_PROXY_DECODE", "http://a, http://b=2")
    monkeypatch.setenv("EPD_PROXY_ENCODE_SERVERS_URLS", "http://e")
    monkeypatch.setenv("EPD_PROXY_NO_REWRITE", "true")
    monkeypatch.setenv("EPD_PROXY_PORT", "81")
    monkeypatch.setenv("EPD_PROXY_SSL_KEYFILE", "k")
    assert cli.main(["serve"]) == 0
    assert urls(served.config.decode) == ["http://a", "http://b"]
    assert urls(served.config.encode) == ["http://e"]
    assert served.config.no_rewrite
    assert (served.options["port"], served.options["ssl_keyfile"]) == (81, "k")


def test_connections_live_half_as_long_as_vllms_variable_says(
    served: Served, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text("keep_alive = 9\n" + FILE)
    assert cli.main(["serve", "--config", file]) == 0
    assert served.config.keep_alive == 9
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "3")
    assert cli.main(["serve", "--config", file]) == 0
    assert served.config.keep_alive == 1.5
    assert cli.main(["serve", "--config", file, "--keep-alive", "1"]) == 0
    assert served.config.keep_alive == 1
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "long")
    assert cli.main(["serve", *DECODE]) == 2
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE: 'long'" in capsys.readouterr().err


def test_none_on_the_line_wins_over_the_file(served: Served, file: str) -> None:
    assert cli.main(["serve", "--config", file, "--encode", "none", "--prefill", ""]) == 0
    assert served.config.encode == served.config.prefill == ()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("serve", "--decode"),
        ("serve --decode none", "--decode"),
        ("serve --decode h:1", "--decode"),
        ("serve --decode http://d --encode ftp://e", "--encode"),
        ("serve --decode http://d --decode-retries x", "--decode-retries"),
        ("serve --decode http://d --encoder-batch-size -1", "--encoder-batch-size"),
        ("serve --decode http://d --connect-timeout soon", "--connect-timeout"),
        ("serve --decode http://d --max-body-size 1XB", "--max-body-size"),
        ("serve --decode http://d --decode-selector best", "--decode-selector"),
        ("serve --decode http://d --port 70000", "--port"),
        ("serve --decode http://d --log-level loud", "--log-level"),
        ("serve --decode http://d --media-ids theirs", "--media-ids"),
        ("serve --decode http://d --media-ids tenant --api-key k", "--media-ids-secret"),
        ("serve --decode http://d --media-ids tenant --media-ids-secret s", "--api-key"),
        ("serve --decode http://d --api-key-file /nowhere", "--api-key-file"),
        ("serve --decode http://d --encode-fallback perhaps", "--encode-fallback"),
        (
            "serve --decode http://d --encode http://e --encode-fallback raw"
            " --ec-consumer-zmq-addrs tcp://d",
            "--encode-fallback",
        ),
        ("serve --decode http://d --idle-timeout -1", "--idle-timeout"),
        ("serve --decode http://d --max-queue x", "--max-queue"),
        ("serve --decode http://d --nonsense", "--nonsense"),
        ("serve --decode http://d --workers 0", "--workers"),
        ("serve --decode http://d --workers two", "--workers"),
        ("serve --decode http://d --shutdown-delay -1", "--shutdown-delay"),
        ("serve --decode http://d --graceful-timeout -1", "--graceful-timeout"),
        ("serve --decode http://d --fail-threshold 0", "--fail-threshold"),
        ("serve --decode http://d --probe-interval -1", "--probe-interval"),
        ("serve --decode http://d --evicted-ttl -1", "--evicted-ttl"),
        ("serve --decode http://d --wait-for-ready -1", "--wait-for-ready"),
        ("serve --decode http://d --drain-timeout -1", "--drain-timeout"),
        ("serve --decode http://d --dynamic-registration", "--dynamic-registration"),
        ("serve --decode http://d --allowed-instance-networks x", "--allowed-instance-networks"),
        ("serve --decode http://d --registry http://r", "--registry"),
        ("serve --decode http://d --registry redis://r:port", "--registry"),
        ("serve --decode dns+https://d", "--decode"),
        ("serve --decode dns+http://10.0.0.1", "--decode"),
        ("serve --decode http://d --encode dns+srv+http://e:8000", "--encode"),
        (
            "serve --dynamic-registration --admin-api-key k --workers 2",
            "--workers",
        ),
        ("serve --config /nowhere.toml", "--config"),
        ("simulate --role boss", "--role"),
        ("simulate", "--role"),
        ("simulate --role decode --chunks 0", "--chunks"),
        ("simulate --role decode --latency-ms -1", "--latency-ms"),
        ("dance", "dance"),
    ],
)
def test_wrong_words_stop_the_start_with_one_line_that_names_the_flag(
    line: str, named: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("epd-proxy: ")
    assert err.count("\n") == 1
    assert named in err
    assert not hasattr(served, "app")


def test_flags_of_the_fleet_and_the_processes_are_heard(served: Served) -> None:
    line = (
        "serve --dynamic-registration --admin-api-key k --registry redis://r/1 --workers 4"
        " --allowed-instance-networks 10.0.0.0/8,fd00::/8 --allowed-instance-networks 192.168.0.1"
        " --probe-interval 1.5 --probe-timeout 0.5 --fail-threshold 2 --evicted-ttl 0"
        " --wait-for-ready 3 --drain-timeout 4 --shutdown-delay 5 --graceful-timeout 6"
    )
    assert cli.main(line.split()) == 0
    config = served.config
    assert config.is_open
    assert (config.dynamic_registration, config.registry) == (True, "redis://r/1")
    assert config.allowed_instance_networks == ("10.0.0.0/8", "fd00::/8", "192.168.0.1/32")
    assert (config.probe_interval, config.probe_timeout, config.fail_threshold) == (1.5, 0.5, 2)
    assert (config.evicted_ttl, config.wait_for_ready, config.drain_timeout) == (0, 3, 4)
    assert served.workers == 4
    assert served.service.delay == 5
    assert served.options["timeout_graceful_shutdown"] == 6
    assert served.service.file is None


def test_by_default_there_is_one_process_which_ends_as_soon_as_its_requests(
    served: Served,
) -> None:
    assert cli.main(["serve", *DECODE]) == 0
    assert (served.workers, served.service.delay) == (1, 0)
    assert served.options["timeout_graceful_shutdown"] == 30
    config = served.config
    assert (config.probe_interval, config.probe_timeout, config.fail_threshold) == (5, 2, 3)
    assert (config.evicted_ttl, config.wait_for_ready, config.drain_timeout) == (900, 0, 60)
    assert not config.is_open


def test_many_processes_need_a_registry_only_where_engines_register(served: Served) -> None:
    many = ["--workers", "2"]
    assert cli.main(["serve", *DECODE, *many]) == 0
    dynamic = ["--dynamic-registration", "--admin-api-key", "k"]
    assert cli.main(["serve", *dynamic, "--workers", "1"]) == 0
    assert cli.main(["serve", *dynamic, *many, "--registry", "redis://r"]) == 0


def test_many_processes_without_a_registry_are_refused_with_the_reason(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADMIN_API_KEY", "k")
    assert cli.main(["serve", "--dynamic-registration", "--workers", "2"]) == 2
    assert "give them a --registry" in capsys.readouterr().err


def test_processes_and_ends_may_be_set_in_the_environment_and_in_a_file(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text("decode = 'http://d'\nworkers = 3\nshutdown_delay = 1.5\ngraceful_timeout = 9")
    assert cli.main(["serve", "--config", str(path)]) == 0
    assert (served.workers, served.service.delay) == (3, 1.5)
    assert served.options["timeout_graceful_shutdown"] == 9
    monkeypatch.setenv("EPD_PROXY_WORKERS", "2")
    assert cli.main(["serve", "--config", str(path)]) == 0
    assert served.workers == 2


# The file, when it is read again


def read_again(served: Served, text: str) -> Config:
    assert served.service.file is not None
    path, read = served.service.file
    path.write_text(text)
    return read(path)


def test_a_file_that_is_read_again_sets_the_instances_and_nothing_else(
    served: Served, file: str
) -> None:
    assert cli.main(["serve", "--config", file]) == 0
    config = read_again(
        served,
        """
        decode_retries = 9
        decode_servers_urls = "http://d1,http://d2=2"
        [[encode]]
        url = "http://e9"
        models = ["m"]
        labels = { zone = "a" }
        """,
    )
    assert [(one.url, one.weight) for one in config.decode] == [("http://d1", 1), ("http://d2", 2)]
    (encoder,) = config.encode
    assert (encoder.url, encoder.models, encoder.labels) == ("http://e9", ("m",), {"zone": "a"})
    assert config.prefill == ()
    assert config.decode_retries == 7


@pytest.mark.parametrize("by", ["flag", "alias", "variable"])
def test_instances_that_the_line_or_the_environment_gives_stay(
    by: str, served: Served, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["serve", "--config", file]
    if by == "variable":
        monkeypatch.setenv("EPD_PROXY_ENCODE", "http://mine")
    else:
        line += ["--encode" if by == "flag" else "--encode-servers-urls", "http://mine"]
    assert cli.main(line) == 0
    config = read_again(served, "decode = 'http://d9'\nencode = 'http://e9'")
    assert urls(config.encode) == ["http://mine"]
    assert urls(config.decode) == ["http://d9"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("decode = [", "Invalid value"),
        ("", "--decode"),
        ("decode = 'd:8000'", "--decode"),
        ("decode = 5", "--decode"),
        ("decode = 'http://d'\n[[encod]]\nurl = 'http://e'", "encod"),
        ("[[decode]]\nurl = 'http://d'\nwieght = 2", "wieght"),
        ("[[decode]]\nurl = 'http://d'\nweight = 0", "weight 0"),
        ("decode = 'http://d'\nencode = 'http://d'", "--decode"),
    ],
)
def test_a_bad_file_that_is_read_again_is_refused_with_the_reason(
    text: str, reason: str, served: Served, file: str
) -> None:
    assert cli.main(["serve", "--config", file]) == 0
    with pytest.raises(ValueError, match=reason):
        read_again(served, text)


def test_a_file_may_leave_an_open_fleet_empty(served: Served, file: str) -> None:
    line = ["--registry", "redis://r", "--prefill", "none"]
    assert cli.main(["serve", "--config", file, *line]) == 0
    config = read_again(served, "")
    assert config.encode == config.prefill == config.decode == ()


def test_what_reads_the_file_goes_to_other_processes(served: Served, file: str) -> None:
    assert cli.main(["serve", "--config", file, "--workers", "2"]) == 0
    service: Service = pickle.loads(pickle.dumps(served.service))
    assert service.file is not None
    path, read = service.file
    assert urls(read(path).prefill) == ["http://p1", "http://p2"]
    assert service.settings(None).log_config == served.options["log_config"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("decode_retrys = 1", "'decode_retrys'"),
        ("config = 'x'", "'config'"),
        ("decode_retries = [", "Invalid value"),
        ("[[decode]]\nurl = 'http://d'\nwieght = 1", "wieght"),
        ("[[decode]]\nurl = 'http://d'\n[[encode]]\nweight = 1", "--encode"),
        ("decode = 5", "--decode"),
        ("decode = 'http://d'\ndecode_retries = 'x'", "--decode-retries"),
    ],
)
def test_a_wrong_file_stops_the_start_with_one_line(
    text: str, named: str, tmp_path: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    assert cli.main(["serve", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert named in err
    assert not hasattr(served, "app")


def test_version_and_help_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"epd-proxy, version {epd_proxy.__version__}\n"
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for field in msgspec.structs.fields(Config):
        assert flag_name(field.name) in text
    assert cli.main([]) == 2
    assert "simulate" in capsys.readouterr().err


def test_an_interrupted_start_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupt)
    assert cli.main(["serve", *DECODE, "--port", "0"]) == 130


def test_simulate_serves_one_engine(served: Served) -> None:
    line = "simulate --role encode --port 8105 --latency-ms 250 --chunks 3"
    assert cli.main(line.split()) == 0
    assert (served.app.role, served.app.latency, served.app.chunks) == ("encode", 0.25, 3)
    assert (served.options["host"], served.options["port"]) == ("127.0.0.1", 8105)


@pytest.mark.parametrize(
    "line", ["demo --once", "simulate --role decode", "serve --decode http://d"]
)
def test_a_port_that_is_taken_is_told_before_anything_starts(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert cli.main([*line.split(), "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"epd-proxy: --port: cannot listen on 127.0.0.1:{port}: Address already")
    assert err.count("\n") == 1


def test_the_demo_shows_an_answer_and_who_served_which_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["demo", "--once", "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert "I was given 1 image (grid 1x6x8) and the words: What do you see?" in out
    row = r"^{0} +{0}-\d +http://127\.0\.0\.1:\d+ +200 +\d+\.\d$"
    for stage in ("encode", "prefill", "decode"):
        assert len(re.findall(row.format(stage), out, re.MULTILINE)) == 1


def test_the_module_is_the_same_command() -> None:
    with running("--version") as process:
        assert process.wait() == 0
    assert process.output == f"epd-proxy, version {epd_proxy.__version__}\n"


def test_the_demos_picture_is_a_real_png() -> None:
    png = demo.picture_png(3, 2)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png[16:24] == (3).to_bytes(4, "big") + (2).to_bytes(4, "big")


def test_the_readme_names_every_flag() -> None:
    readme = (Path(epd_proxy.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme.partition("### Flags and config")[2].partition("```toml")[0]
    names = [flag_name(field.name) for field in msgspec.structs.fields(Config)]
    for name in (*names, "--workers", "--shutdown-delay", "--graceful-timeout"):
        assert table.count(f"`{name}`") == 1
