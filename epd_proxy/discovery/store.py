"""
One fleet in Redis, for any number of workers and proxies on any number of machines.

Changes are told on a channel; besides, everybody looks twice a second, which shows what has
expired. While Redis is away the proxies go on with what they know, and what Redis has forgotten
when it is back (or after a ``FLUSHALL``) they put back. ``scripts`` has the keys.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
from msgspec import Struct

from epd_proxy.config import normalised_url
from epd_proxy.discovery import scripts
from epd_proxy.discovery.sources import Source, Tell
from epd_proxy.errors import ConfigError, Conflict, Overloaded
from epd_proxy.registry import Spec

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

_OPTION = "--registry"
_PREFIX = "epd-proxy:"
_POLL = 0.5
"""Seconds between two looks where nobody tells of a change."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_LIMIT = 1.0
"""Seconds Redis has to answer, unless its URL says otherwise: ``?socket_timeout=3``."""
_LONGEST_TTL = 366 * 86400.0


class Away(Overloaded):
    """Redis cannot be reached, or refuses; nothing was changed, as far as is known."""


class Entry(Struct, frozen=True, omit_defaults=True):
    """A registered instance; ``ttl`` is the seconds after which it is forgotten, None for never."""

    spec: Spec
    ttl: float | None = None
    draining: bool = False


class _View(NamedTuple):
    """What a script answers, see there."""

    memory: str = ""
    version: int = 0
    entries: tuple[Entry, ...] = ()
    draining: frozenset[str] = frozenset()


class Store(Source):
    """
    The fleet in Redis.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` as the redis package reads it;
    ``?prefix=`` keeps fleets apart. ``drained`` gets all URLs that drain, before ``tell`` if both
    have changed; they may be of instances that other sources declare.

    What is asked of the store is done, and told here, when the call returns. It raises ``Away`` if
    Redis is.
    """

    def __init__(
        self,
        url: str,
        tell: Tell,
        drained: Callable[[frozenset[str]], None] = lambda _urls: None,
    ) -> None:
        url, prefix = _split(url)
        super().__init__(f"Redis {_place(url)}", tell)
        self._redis, self._errors = _client(url)
        self._drained = drained
        self._prefix = prefix
        self._keys = [prefix, *(prefix + name for name in ("roles", "draining", "state"))]
        self._scripts: dict[str, Any] = {}
        self._view = _View()
        self._raw: Any = None
        self._was_away = False
        self._pause = _SHORTEST_PAUSE
        # Answers are taken in the order of the questions.
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        with suppress(Away):
            await self._ask(scripts.LOAD)
        self._repeat(self._follow)

    async def aclose(self) -> None:
        await super().aclose()
        await self._redis.aclose()

    async def register(self, spec: Spec, ttl: float | None = None) -> bool:
        """
        True if the instance is new. Registering again changes it, and is its heartbeat.

        Raises Conflict, and ValueError for a ``ttl`` that is none.
        """
        if ttl is not None and not 0 < ttl < math.inf:
            raise ValueError(f"a ttl of {ttl:g} seconds is not above 0, or not finite")
        answer = await self._ask(scripts.REGISTER, *_stored(Entry(spec, ttl)))
        if isinstance(answer, list):
            url, role = (word.decode() for word in answer)
            if url == spec.url:
                raise Conflict(f"{url} is registered as {role}")
            raise Conflict(f"{spec.role} cannot be mixed with {role}, which {url} is")
        return bool(answer)

    async def deregister(self, url: str) -> bool:
        """True if the instance was registered."""
        return bool(await self._ask(scripts.DEREGISTER, normalised_url(url)))

    async def drain(self, url: str, on: bool) -> bool:
        """Marks a URL, registered or not; True if that changes anything."""
        command = "SADD" if on else "SREM"
        return bool(await self._ask(scripts.DRAIN, normalised_url(url), command))

    async def mark(self, url: str, member: str, seconds: float) -> None:
        """For so long, unless it is said again: ``member`` has work in progress at a URL."""
        await self._do(self._redis.set(f"{self._busy(url)}{member}", "", px=int(seconds * 1000)))

    async def unmark(self, url: str, member: str) -> None:
        await self._do(self._redis.delete(f"{self._busy(url)}{member}"))

    async def is_busy(self, url: str) -> bool:
        """Whether anybody has work in progress there, as far as they have said so."""
        pattern = re.sub(r"([\[\]*?\\])", r"\\\1", self._busy(url)) + "*"
        cursor: Any = None
        while cursor != 0:
            cursor, found = await self._do(self._redis.scan(cursor or 0, pattern, count=1000))
            if found:
                return True
        return False

    def _busy(self, url: str) -> str:
        return f"{self._prefix}busy:{url}:"

    async def _do(self, command: Awaitable[Any]) -> Any:
        try:
            return await command
        except self._errors as exc:
            raise self._lose(exc) from exc

    async def all(self) -> list[Entry]:
        """As Redis has it now, in the order of the URLs."""
        await self._ask(scripts.LOAD)
        return [
            msgspec.structs.replace(entry, draining=entry.spec.url in self._view.draining)
            for entry in self._view.entries
        ]

    async def _follow(self) -> None:
        """Until Redis goes away; then waits a little for it to come back."""
        try:
            async with self._redis.pubsub(ignore_subscribe_messages=True) as news:
                await news.subscribe(f"{self._prefix}changes")
                while True:
                    await self._ask(scripts.LOAD)
                    await _some(news)
        except Away:
            pass
        except self._errors as exc:
            self._lose(exc)
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    async def _ask(self, script: str, *words: str) -> Any:
        """A script's own result; what it says of the fleet is taken over."""
        async with self._turn:
            try:
                result, *found = await self._run(script, secrets.token_hex(8), *words)
                if self._has_lost(found):
                    _, *found = await self._run(scripts.RESTORE, *self._known())
            except self._errors as exc:
                raise self._lose(exc) from exc
            self._take(found)
        return result

    async def _run(self, script: str, *words: str) -> list[Any]:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(script)
        answer: list[Any] = await self._scripts[script](keys=self._keys, args=words)
        return answer

    def _has_lost(self, found: Sequence[Any]) -> bool:
        """Whether Redis may have less than we know. ``RESTORE`` decides, by the same rule."""
        memory, version, known = found[0].decode(), found[1], self._view
        if not known.memory:
            return False
        if memory != known.memory or version < known.version:
            return True
        # Nobody changed anything meanwhile, but heartbeats could not come.
        return self._was_away and bool(version == known.version)

    def _known(self) -> list[str]:
        known = self._view
        words = [known.memory, str(known.version), str(int(self._was_away))]
        words.append(str(len(known.entries)))
        for entry in known.entries:
            words += _stored(entry)
        return [*words, *known.draining]

    def _lose(self, exc: Exception) -> Away:
        self._was_away = True
        self._note("away", f"cannot be used: {exc}")
        return Away("the registry cannot be used")

    def _take(self, found: list[Any]) -> None:
        self._was_away = False
        self._pause = _SHORTEST_PAUSE
        self._note("away", "")
        if found != self._raw:
            self._raw = found
            draining = self._view.draining
            self._view = self._decoded(*found)
            if self._view.draining != draining:
                self._drained(self._view.draining)
        self._say([entry.spec for entry in self._view.entries])

    def _decoded(
        self, memory: bytes, version: int, entries: list[bytes], draining: list[bytes]
    ) -> _View:
        found, wrong = [], ""
        for raw in entries:
            try:
                found.append(msgspec.json.decode(raw, type=Entry))
            except msgspec.DecodeError as exc:
                wrong = f"an entry is left out: {exc}"
        self._note("entries", wrong)
        found.sort(key=lambda entry: entry.spec.url)
        urls = frozenset(url.decode() for url in draining)
        return _View(memory.decode(), version, tuple(found), urls)


async def _some(news: PubSub) -> None:
    """Until a change is told, or it is time to look anyway. Changes in a row are one."""
    if await news.get_message(timeout=_POLL):
        while await news.get_message(timeout=0):
            pass


def _stored(entry: Entry) -> list[str]:
    """An entry as the scripts take it."""
    spec, ttl = entry.spec, entry.ttl
    expiry = "" if ttl is None else str(math.ceil(min(ttl, _LONGEST_TTL) * 1000))
    text = msgspec.json.encode(entry, order="deterministic").decode()
    return [spec.url, spec.role, text, expiry]


def _split(url: str) -> tuple[str, str]:
    """The URL without ``?prefix=``, and the prefix of all keys."""
    parts = urlsplit(url)
    options = parse_qsl(parts.query)
    prefix = dict(options).get("prefix", _PREFIX)
    rest = urlencode([option for option in options if option[0] != "prefix"])
    return parts._replace(query=rest).geturl(), f"{prefix.removesuffix(':')}:"


def _client(url: str) -> tuple[Redis, tuple[type[Exception], ...]]:
    """A client that does not repeat anything by itself, and what it may raise."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError
    except ImportError:
        reason = "needs the redis package: pip install 'epd-proxy[redis]'"
        raise ConfigError(_OPTION, reason) from None
    try:
        client = Redis.from_url(
            url,
            socket_timeout=_LIMIT,
            socket_connect_timeout=_LIMIT,
            retry=Retry(NoBackoff(), 0),
        )
        # Does not connect, but takes the options in the URL.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError) as exc:
        raise ConfigError(_OPTION, str(exc)) from None
    return client, (RedisError, OSError)


def _place(url: str) -> str:
    """Where it is, without the password."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"
