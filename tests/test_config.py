from __future__ import annotations

from typing import Any

import pytest

from epd_proxy import Config, ConfigError, EPDProxy, InstanceConfig
from epd_proxy.config import parse_instances, parse_size

D = "http://d:8000"


def urls(value: Any) -> list[str]:
    return [instance.url for instance in parse_instances(value)]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("HTTP://H:8000", "http://h:8000"),
        ("http://h:80", "http://h"),
        ("https://h:443/", "https://h"),
        ("http://h:443", "http://h:443"),
        ("http://h:1/pre/fix/", "http://h:1/pre/fix"),
        ("http://h:1/Pre/Fix", "http://h:1/Pre/Fix"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]", "http://[::1]"),
        ("http+unix://%2frun%2fD.sock/x/", "http+unix://%2Frun%2F%44.sock/x"),
    ],
)
def test_an_address_is_kept_in_one_spelling(given: str, kept: str) -> None:
    assert urls(given) == [kept]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("h:1", "must start with http:// or https://"),
        ("ftp://h", "must start with http:// or https://"),
        ("http://u:p@h", "user name"),
        ("http://h:99999", "Port out of range"),
        ("http://h:x", "Port could not be cast"),
        ("http://h:0", "port 0"),
        ("http+unix:///run/d", "no path of a socket"),
        ("http+unix://run", "no path of a socket"),
        ("http://", "no host"),
        ("http://:80", "no host"),
        ("http://[::1", "Invalid IPv6"),
        ("http://h?x=a", "query"),
        ("http://h#x", "query or a fragment"),
        ("http://h h", "blanks"),
        ("http://h\\x:1", "is no host"),
        ("http://h<x>", "is no host"),
        ("http://[v1.x]:1", "v1.x"),
        ("http://[1.2.3.4]:1", "IPv4"),
        ("http://h\tx", "blanks or control"),
        ("http://h=0", "weight 0 is not above 0"),
        ("http://h=-1", "weight -1 is not above 0"),
        ("http://h=inf", "weight inf is not above 0, or not finite"),
        ("http://h=nan", "weight nan"),
        ("http://h=many", "Expected `float`"),
    ],
)
def test_an_address_nobody_can_call_is_refused_with_the_reason(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Config(decode=[given])
    assert caught.value.option == "--decode"


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(decode="http://user:secret@h")
    assert "secret" not in str(caught.value)


def test_instances_come_as_comma_lists_tables_and_values() -> None:
    given = ["http://a, http://b=2.5", {"url": "http://c", "weight": 3}, InstanceConfig("http://d")]
    assert [(one.url, one.weight) for one in parse_instances(given)] == [
        ("http://a", 1.0),
        ("http://b", 2.5),
        ("http://c", 3.0),
        ("http://d", 1.0),
    ]


@pytest.mark.parametrize("given", [None, "", "none", "NONE", "disable", "none,", [], ["none", ""]])
def test_none_disable_and_nothing_stand_for_no_instance(given: Any) -> None:
    assert parse_instances(given) == ()


def test_the_same_address_in_two_spellings_is_one_instance() -> None:
    assert urls("http://h:80,http://H/,http://h") == ["http://h"]


def test_an_unknown_key_of_an_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="wieght"):
        Config(decode=[{"url": D, "wieght": 2}])


@pytest.mark.parametrize(
    ("given", "size"),
    [(7, 7), ("7", 7), ("64KiB", 65536), ("256MiB", 256 << 20), ("1 gib", 1 << 30)],
)
def test_a_size_is_bytes_or_text_with_a_unit(given: Any, size: int) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("decode_retries", "x", "--decode-retries"),
        ("encoder_batch_size", -1, "--encoder-batch-size"),
        ("connect_timeout", -0.1, "--connect-timeout"),
        ("connect_timeout", "soon", "--connect-timeout"),
        ("max_body_size", "64kb", "--max-body-size"),
        ("max_body_size", "-1", "--max-body-size"),
        ("max_body_size", 0, "--max-body-size"),
        ("no_rewrite", "perhaps", "--no-rewrite"),
        ("encode", 5, "--encode"),
        ("metadata_format", "xml", "--metadata-format"),
        ("kv_connector", "mooncake", "--kv-connector"),
        ("ec_consumer_dp_size", 0, "--ec-consumer-dp-size"),
        ("encode_max_tokens", -1, "--encode-max-tokens"),
        ("encode_selector", 5, "--encode-selector"),
        ("encode_retries", -1, "--encode-retries"),
        ("encode_fallback", "text", "--encode-fallback"),
        ("stream_guard", -1, "--stream-guard"),
        ("media_ids", "uuid", "--media-ids"),
        ("api_key", 5, "--api-key"),
        ("encode_timeout", -1, "--encode-timeout"),
        ("prefill_timeout", "long", "--prefill-timeout"),
        ("first_byte_timeout", -1, "--first-byte-timeout"),
        ("idle_timeout", -1, "--idle-timeout"),
        ("body_timeout", -1, "--body-timeout"),
        ("max_concurrency", -1, "--max-concurrency"),
        ("max_queue", 0.5, "--max-queue"),
        ("queue_timeout", -1, "--queue-timeout"),
        ("allowed_media_hosts", 5, "--allowed-media-hosts"),
    ],
)
def test_a_wrong_value_is_refused_under_its_flags_name(field: str, value: Any, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(decode=D, **{field: value})
    assert caught.value.option == option
    assert str(caught.value).startswith(f"{option}: ")


def test_text_is_converted_wherever_it_comes_from() -> None:
    text: dict[str, Any] = {
        "decode_retries": "-1",
        "connect_timeout": "0.5",
        "max_body_size": "1KiB",
        "no_rewrite": "true",
    }
    config = Config(decode=D, **text)
    assert config.decode_retries == -1
    assert config.connect_timeout == 0.5
    assert config.max_body_size == 1024
    assert config.no_rewrite is True


@pytest.mark.parametrize("address", ["http://10.0.0.256:8000", "http://☃..net", "http://a..b☃"])
def test_an_address_that_no_transport_could_call_stops_the_start(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EPDProxy(config=Config(encode="http://e", decode=address))
    assert caught.value.option == "--decode"
    assert address in str(caught.value)


def test_a_fleet_without_decode_is_refused() -> None:
    with pytest.raises(ConfigError, match="--decode: at least one decode server is needed"):
        Config(encode="http://e")


def test_an_unknown_field_is_refused() -> None:
    unknown: dict[str, Any] = {"decode_retry": 1}
    with pytest.raises(TypeError, match="decode_retry"):
        Config(decode=D, **unknown)


def test_a_config_does_not_change() -> None:
    config = Config(decode=D)
    with pytest.raises(AttributeError):
        config.decode_retries = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("decode", "size", "addresses"),
    [
        ("http://a", 1, "tcp://a:1"),
        ("http://a,http://b", 1, ["tcp://a:1", "tcp://b:1"]),
        ("http://a,http://b", 2, "tcp://a:1, tcp://a:2, tcp://b:1, tcp://b:2"),
    ],
)
def test_there_is_one_push_address_for_each_decode_server_and_replica(
    decode: str, size: int, addresses: Any
) -> None:
    config = Config(decode=decode, ec_consumer_dp_size=size, ec_consumer_zmq_addrs=addresses)
    assert len(config.ec_consumer_zmq_addrs) == len(config.decode) * size


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"ec_consumer_dp_size": 2}, "1 addresses for 1 decode servers of 2 replicas each"),
        ({"decode": "http://a,http://b"}, "1 addresses for 2 decode servers of 1 replicas each"),
        ({"prefill": "http://p"}, "give no prefill server"),
    ],
)
def test_a_wrong_count_or_a_prefill_role_beside_push_addresses_stops_the_start(
    more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Config(**{"decode": D, "ec_consumer_zmq_addrs": ("tcp://a:1",), **more})
    assert caught.value.option == "--ec-consumer-zmq-addrs"


def test_the_defaults_are_those_that_were_promised() -> None:
    config = Config(decode=D)
    assert (config.connect_timeout, config.encode_timeout, config.prefill_timeout) == (5, 900, 600)
    assert (config.first_byte_timeout, config.idle_timeout, config.body_timeout) == (0, 600, 60)
    assert (config.max_concurrency, config.max_queue, config.queue_timeout) == (0, 0, 30)
    assert (config.encode_retries, config.decode_retries, config.stream_guard) == (1, 1, 5)
    assert (config.encode_fallback, config.media_ids) == ("none", "caller")
    assert config.max_body_size == 256 << 20
    assert config.api_key == config.allowed_media_schemes == config.allowed_media_hosts == ()
    trusts = (config.trust_transfer_params, config.trust_embeds, config.expose_topology)
    assert trusts == (False, False, False)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("", ()), (None, ()), ("a,b c", ("a,b c",)), (["a", "b"], ("a", "b")), ((), ())],
)
def test_keys_are_kept_as_they_are(given: Any, kept: tuple[str, ...]) -> None:
    assert Config(decode=D, api_key=given).api_key == kept


def test_schemes_and_hosts_are_kept_in_one_spelling() -> None:
    given: dict[str, Any] = {
        "allowed_media_schemes": "HTTPS://, data:,",
        "allowed_media_hosts": ["A.Example.,[::1]", "2001:DB8::", "[fd00::]"],
    }
    config = Config(decode=D, **given)
    assert config.allowed_media_schemes == ("https", "data")
    assert config.allowed_media_hosts == ("a.example", "::1", "2001:db8::", "fd00::")


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({}, "--media-ids-secret"),
        ({"api_key": "k"}, "--media-ids-secret"),
        ({"media_ids_secret": "s"}, "--api-key"),
    ],
)
def test_tenants_need_a_secret_and_keys(more: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match="needed for --media-ids tenant") as caught:
        Config(decode=D, media_ids="tenant", **more)
    assert caught.value.option == option


@pytest.mark.parametrize("keys", [{"api_key": "k"}, {"api_key_file": "f"}])
def test_tenants_are_known_by_keys_from_anywhere(keys: dict[str, Any]) -> None:
    assert Config(decode=D, media_ids="tenant", media_ids_secret="s", **keys).media_ids == "tenant"


def test_a_fallback_beside_push_addresses_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="push addresses") as caught:
        Config(decode=D, ec_consumer_zmq_addrs=("tcp://d",), encode_fallback="raw")
    assert caught.value.option == "--encode-fallback"


@pytest.mark.parametrize("key", ["a\nb", "a\r", "a\0b"])
def test_a_key_for_engines_that_no_header_can_hold_stops_the_start(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EPDProxy(config=Config(decode=D, upstream_api_key=key))
    assert caught.value.option == "--upstream-api-key"
