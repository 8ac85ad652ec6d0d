"""
What an operator may set: one frozen value, built from Python, TOML, the environment or flags.

A field is a flag: ``decode_retries`` is ``--decode-retries`` on the command line,
``EPD_PROXY_DECODE_RETRIES`` in the environment and ``decode_retries`` in TOML; its default, its
bounds and its help stand here and nowhere else. Every source may give text (``"3"``, ``"64KiB"``,
``"http://a:1,http://b:2"``); the value is converted and checked when the ``Config`` is built.
Times are float seconds, sizes are bytes.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta, Struct

from epd_proxy.errors import ConfigError

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
# Names in other scripts are for the resolver's rules to judge.
_HOST = re.compile(r"[a-z0-9._-]+|.*[^\x00-\x7f].*")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_UNIX = "http+unix"


class InstanceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """
    One engine: where it listens, and its share of the work under a selector that weighs.

    ``url`` may hold a path, which is put before ``/v1/chat/completions``. It is kept in one
    spelling (no trailing slash, host in lower case, no default port), so that two spellings of
    one address are one instance. ``models``: the names it serves; none given: any. ``dns+http://``
    and ``dns+srv+http://`` stand for every address of a name.
    """

    url: str
    weight: float = 1.0
    models: tuple[str, ...] = ()
    labels: dict[str, str] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "url", engine_url(self.url))
        if not 0 < self.weight < math.inf:
            raise ValueError(f"{self.url}: weight {self.weight:g} is not above 0, or not finite")


def is_name(url: str) -> bool:
    """Whether a URL is a name to look up, which stands for any number of instances."""
    return url.startswith("dns+")


def engine_url(text: str) -> str:
    """One spelling for one instance, or for one name. Raises ValueError."""
    if not is_name(text):
        return normalised_url(text)
    prefix = "dns+srv+" if text.startswith("dns+srv+") else "dns+"
    if text.startswith("dns+https:"):
        raise ValueError(
            f"{text!r}: DNS gives addresses, and certificates are made out to names; write"
            " https://, or dns+srv+https:// for SRV records"
        )
    return prefix + normalised_url(text.removeprefix(prefix))


def normalised_url(text: str) -> str:
    """Raises ValueError with the reason if no engine can be called at ``text``."""
    if not text.isprintable() or " " in text:
        raise ValueError(f"{text!r} holds blanks or control characters")
    parts = urlsplit(text)
    if parts.scheme == _UNIX:
        return f"{_UNIX}://{_socket(parts.netloc)}{parts.path.rstrip('/')}"
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(f"{text!r} must start with http:// or https:// (or http+unix://)")
    if "@" in parts.netloc:
        raise ValueError("an address must not hold a user name or password")
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r} must not hold a query or a fragment")
    if not parts.hostname:
        raise ValueError(f"{text!r} has no host")
    hostname = parts.hostname
    if "[" in parts.netloc:
        hostname = ipaddress.IPv6Address(parts.hostname).compressed
    elif not _HOST.fullmatch(parts.hostname):
        raise ValueError(f"{text!r}: {parts.hostname!r} is no host")
    try:
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{text!r}: {exc}") from None
    if port == 0:
        raise ValueError(f"{text!r}: port 0 cannot be called")
    host = f"[{hostname}]" if ":" in hostname else hostname
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        host = f"{host}:{port}"
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def _socket(netloc: str) -> str:
    """A socket's path as a host. Hosts are put into lower case, so capitals are escaped."""
    path = unquote(netloc)
    if not path.startswith("/"):
        raise ValueError(f"{netloc!r} is no path of a socket: write http+unix://%2Fpath%2Fto%2Fit")
    return re.sub(rb"[^a-z0-9._-]", lambda found: b"%%%02X" % ord(found[0]), path.encode()).decode()


def parse_instances(value: Any) -> tuple[InstanceConfig, ...]:
    """
    Instances from a comma list, or from a sequence of comma lists, tables and instances.

    An address may carry a weight, ``http://host:8000=5``. ``none``, ``disable`` and nothing at all
    stand for no instance. An address that comes twice counts once.
    """
    if value is None or isinstance(value, str | Mapping | InstanceConfig):
        value = [value or "none"]
    found: dict[str, InstanceConfig] = {}
    for entry in value:
        for instance in _instances_of(entry):
            found.setdefault(instance.url, instance)
    return tuple(found.values())


def _instances_of(entry: Any) -> Iterable[InstanceConfig]:
    if not isinstance(entry, str):
        return [msgspec.convert(entry, InstanceConfig)]
    words = [word.strip() for word in entry.split(",")]
    return [_instance_of(word) for word in words if word.lower() not in ("", "none", "disable")]


def _instance_of(word: str) -> InstanceConfig:
    url, equals, weight = word.rpartition("=")
    if not equals or "?" in url:
        return InstanceConfig(word)
    return msgspec.convert({"url": url, "weight": weight}, InstanceConfig, strict=False)


def parse_list(value: Any) -> Any:
    """Words from a comma list, or from a sequence of comma lists."""
    lists = [value] if isinstance(value, str) else list(value)
    return [word.strip() for words in lists for word in words.split(",") if word.strip()]


def _keys(value: Any) -> Any:
    """Keys as they are: they may hold commas."""
    return [value] if isinstance(value, str) and value else value or ()


def _schemes(value: Any) -> Any:
    return [word.lower().rstrip(":/") for word in parse_list(value)]


def _networks(value: Any) -> Any:
    return [str(ipaddress.ip_network(word)) for word in parse_list(value)]


def _hosts(value: Any) -> Any:
    return [word.lower().rstrip(".").strip("[]") for word in parse_list(value)]


def parse_size(value: Any) -> Any:
    """Bytes, from a number or from text such as ``64KiB``."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+)\s*([KMG]iB)?\s*", value, re.IGNORECASE)
    if not found:
        raise ValueError(f"{value!r} is no size; write bytes, or 64KiB, 256MiB, 1GiB")
    return int(found[1]) * _UNITS[(found[2] or "").upper()]


def flag_name(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


class Flag(Struct, frozen=True):
    """What the command line knows of a field: its help, and how its text is read."""

    help: str
    parse: Callable[[Any], Any] | None = None
    alias: str | None = None
    """A second spelling, vLLM's."""
    env: str | None = None
    """A second variable, vLLM's."""
    many: bool = False


def _fleet(role: str) -> Flag:
    return Flag(
        f"{role} servers: URL or URL=WEIGHT, comma lists, repeatable; 'none' for none",
        parse=parse_instances,
        alias=f"--{role}-servers-urls",
        many=True,
    )


def _selector(role: str) -> Flag:
    return Flag(
        f"how {role} servers are chosen: round-robin, random, weighted, least-busy, affinity, the"
        " name of an installed selector, or module:attribute"
    )


NotNegative = Meta(ge=0)


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Everything a proxy is built from. Raises ConfigError, which names the flag.

    ``encode``, ``prefill`` and ``decode`` take what ``parse_instances`` takes, and read as a tuple
    of ``InstanceConfig``: ``Config(encode=["http://e1:8000", "http://e2:8000"], decode="http://d")``.
    Encode absent: media goes to the engines as it came. Prefill absent: decode prefills too.
    """

    encode: Annotated[Any, _fleet("encode")] = ()
    prefill: Annotated[Any, _fleet("prefill")] = ()
    decode: Annotated[Any, _fleet("decode")] = ()
    encode_selector: Annotated[str, _selector("encode")] = "round-robin"
    prefill_selector: Annotated[str, _selector("prefill")] = "round-robin"
    decode_selector: Annotated[str, _selector("decode")] = "round-robin"
    encoder_batch_size: Annotated[
        int,
        NotNegative,
        Flag("images in one encode call at most; 0: no limit", env="ENCODER_MAX_BATCH_SIZE"),
    ] = 0
    decode_retries: Annotated[
        int,
        Flag("how often to redo a request that prefill or decode failed; below 0 counts as 0"),
    ] = 1
    encode_retries: Annotated[
        int, NotNegative, Flag("how often to repeat an encode call that failed, by another encoder")
    ] = 1
    encode_fallback: Annotated[
        Literal["none", "raw"],
        Flag("raw: what no encoder can serve goes to prefill and decode as it is"),
    ] = "none"
    stream_guard: Annotated[
        float,
        NotNegative,
        Flag("seconds for which a stream is held until it says something of value; 0: not at all"),
    ] = 5.0
    encode_max_tokens: Annotated[
        int, NotNegative, Flag("max_tokens of encode calls, for older encoders; 0: none")
    ] = 0
    metadata_format: Annotated[
        Literal["json", "tensor"],
        Flag("how references carry metadata: json, or tensor for engines before vLLM 0.33"),
    ] = "json"
    ec_consumer_zmq_addrs: Annotated[
        tuple[str, ...],
        Flag(
            "where encoders push embeddings to (Mooncake): one address for each decode server and"
            " replica, s0r0,s0r1,s1r0,...",
            parse=parse_list,
            many=True,
        ),
    ] = ()
    ec_consumer_dp_size: Annotated[
        int, Meta(ge=1), Flag("data-parallel replicas of each decode server, used in turn")
    ] = 1
    kv_connector: Annotated[
        Literal["nixl", "shared"],
        Flag("how decode finds the KV cache: nixl, by prefill's handle; shared, by content"),
    ] = "nixl"
    kv_remote_host_from_url: Annotated[
        bool, Flag("in prefill's handle, replace remote_host by the host of prefill's URL")
    ] = False
    admin_api_key: Annotated[
        str, Flag("X-API-Key of profiling calls, which are off without", env="ADMIN_API_KEY")
    ] = ""
    profile_api_key: Annotated[
        str, Flag("bearer that engines get with profiling calls", env="OPENAI_API_KEY")
    ] = ""
    api_key: Annotated[
        tuple[str, ...],
        Flag("key that callers must send as a bearer; repeatable", parse=_keys, many=True),
    ] = ()
    api_key_file: Annotated[str, Flag("file of such keys, one a line")] = ""
    upstream_api_key: Annotated[str, Flag("bearer that engines get in place of the caller's")] = ""
    media_ids: Annotated[
        Literal["caller", "content", "tenant"],
        Flag(
            "what names media in the caches: the caller's uuid, else its content; its content;"
            " or its content and the caller's key"
        ),
    ] = "caller"
    media_ids_secret: Annotated[str, Flag("key of the HMAC that names media for a tenant")] = ""
    allowed_media_schemes: Annotated[
        tuple[str, ...],
        Flag("schemes that URLs of media may have; none given: any", _schemes, many=True),
    ] = ()
    allowed_media_hosts: Annotated[
        tuple[str, ...],
        Flag("hosts that URLs of media may name; none given: any", _hosts, many=True),
    ] = ()
    trust_transfer_params: Annotated[
        bool, Flag("let callers send transfer parameters and routing headers to the engines")
    ] = False
    expose_topology: Annotated[bool, Flag("name the addresses of engines in error answers")] = False
    no_rewrite: Annotated[
        bool, Flag("leave media as the caller sent it, for engines that keep it in their cache")
    ] = False
    trust_embeds: Annotated[
        bool, Flag("let callers send *_embeds parts; a wrong one can end an engine")
    ] = False
    connect_timeout: Annotated[
        float, NotNegative, Flag("seconds to reach an engine; 0: no limit")
    ] = 5.0
    encode_timeout: Annotated[
        float, NotNegative, Flag("seconds an encoder may be silent; 0: no limit")
    ] = 900.0
    prefill_timeout: Annotated[
        float, NotNegative, Flag("seconds a prefill server may be silent; 0: no limit")
    ] = 600.0
    first_byte_timeout: Annotated[
        float, NotNegative, Flag("seconds until the head of decode's answer; 0: no limit")
    ] = 0.0
    idle_timeout: Annotated[
        float, NotNegative, Flag("seconds between two bytes of decode's answer; 0: no limit")
    ] = 600.0
    keep_alive: Annotated[
        float,
        NotNegative,
        Flag(
            "seconds for which an idle connection to an engine may be used again; 0: never;"
            " half of VLLM_HTTP_TIMEOUT_KEEP_ALIVE where that is set"
        ),
    ] = 2.5
    max_connections: Annotated[
        int, NotNegative, Flag("connections to one engine at most; 0: no limit")
    ] = 0
    pool_timeout: Annotated[
        float, NotNegative, Flag("seconds to wait for one of them; 0: no limit")
    ] = 5.0
    dynamic_registration: Annotated[
        bool, Flag("let engines register themselves (POST /instances); needs ADMIN_API_KEY")
    ] = False
    registry: Annotated[
        str, Flag("redis://..., one fleet for any number of workers and proxies; extra 'redis'")
    ] = ""
    allowed_instance_networks: Annotated[
        tuple[str, ...],
        Flag("networks that engines may register in; none given: any", _networks, many=True),
    ] = ()
    drain_timeout: Annotated[
        float, NotNegative, Flag("seconds that draining an engine waits for its calls; 0: no limit")
    ] = 60.0
    wait_for_ready: Annotated[
        float, NotNegative, Flag("seconds that a request waits for an engine to be ready")
    ] = 0.0
    probe_interval: Annotated[
        float, NotNegative, Flag("seconds from one GET /health of an engine to the next; 0: never")
    ] = 5.0
    fail_threshold: Annotated[
        int, Meta(ge=1), Flag("probes that fail in a row until an engine is out")
    ] = 3
    evicted_ttl: Annotated[
        float,
        NotNegative,
        Flag("seconds after which a registered engine that is out is forgotten; 0: never"),
    ] = 900.0
    probe_timeout: Annotated[
        float, NotNegative, Flag("seconds an engine has to answer GET /health; 0: no limit")
    ] = 2.0
    max_body_size: Annotated[
        int, Meta(ge=1), Flag("largest request body: bytes, or 256MiB", parse=parse_size)
    ] = 256 << 20
    body_timeout: Annotated[
        float, NotNegative, Flag("seconds a request body may stall; 0: no limit")
    ] = 60.0
    max_concurrency: Annotated[
        int, NotNegative, Flag("chat requests in work at most; 0: no limit")
    ] = 0
    max_queue: Annotated[int, NotNegative, Flag("chat requests that wait for that at most")] = 0
    queue_timeout: Annotated[
        float, NotNegative, Flag("seconds that each of them waits at most; 0: no limit")
    ] = 30.0
    log_requests: Annotated[bool, Flag("log a line for every request")] = False

    def __post_init__(self) -> None:
        for option in msgspec.structs.fields(type(self)):
            value = _checked(option, getattr(self, option.name))
            msgspec.structs.force_setattr(self, option.name, value)
        if not self.decode and not self.is_open:
            raise ConfigError("--decode", "at least one decode server is needed")
        if self.dynamic_registration and not self.admin_api_key:
            reason = "needs a key: set ADMIN_API_KEY"
            raise ConfigError(flag_name("dynamic_registration"), reason)
        self._check_roles()
        for name in ("upstream_api_key", "profile_api_key"):
            if not getattr(self, name).isprintable():
                raise ConfigError(flag_name(name), "holds what no header can hold")
        if self.ec_consumer_zmq_addrs:
            self._check_push()
        if self.media_ids == "tenant":
            self._check_tenants()

    @property
    def is_open(self) -> bool:
        """Whether instances may come that the configuration does not know."""
        return self.dynamic_registration or bool(self.registry)

    def _check_roles(self) -> None:
        seen: dict[str, str] = {}
        for role in ("encode", "prefill", "decode"):
            for instance in getattr(self, role):
                if (other := seen.setdefault(instance.url, role)) != role:
                    reason = f"{instance.url} is given as --{other} already"
                    raise ConfigError(flag_name(role), reason)

    def _check_tenants(self) -> None:
        if not self.media_ids_secret:
            raise ConfigError(flag_name("media_ids_secret"), "needed for --media-ids tenant")
        if not (self.api_key or self.api_key_file):
            raise ConfigError(flag_name("api_key"), "needed for --media-ids tenant")

    def _check_push(self) -> None:
        option = flag_name("ec_consumer_zmq_addrs")
        if self.encode_fallback == "raw":
            reason = "cannot be combined with push addresses"
            raise ConfigError(flag_name("encode_fallback"), reason)
        if self.prefill:
            raise ConfigError(option, "needs decode servers that prefill: give no prefill server")
        given, size = len(self.ec_consumer_zmq_addrs), self.ec_consumer_dp_size
        if given != len(self.decode) * size:
            raise ConfigError(
                option,
                f"{given} addresses for {len(self.decode)} decode servers of {size} replicas each",
            )


def flag_of(option: msgspec.structs.FieldInfo) -> Flag:
    """The ``Flag`` beside a field of ``Config``."""
    return next(note for note in option.type.__metadata__ if isinstance(note, Flag))


def _checked(option: msgspec.structs.FieldInfo, value: Any) -> Any:
    parse = flag_of(option).parse
    try:
        return msgspec.convert(parse(value) if parse else value, option.type, strict=False)
    except (ValueError, TypeError) as exc:
        raise ConfigError(flag_name(option.name), str(exc)) from None
