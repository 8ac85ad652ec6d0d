"""
The instrument itself: that an engine knows what was sent to it when it should have been left alone.
"""

from __future__ import annotations

import asyncio

from tests.faults.fleet import request
from tests.fleet.engines import Living, living
from tests.fleet.proxies import Line, line


async def chat(one: Line) -> None:
    assert await one.chat(request()) == 200


async def test_what_was_sent_before_the_seal_is_not_late_though_it_is_read_after_it() -> None:
    engine = Living("decode")
    async with living(engine), line(engine.url) as old, line(engine.url) as new:
        await chat(old)
        calls = [asyncio.create_task(chat(one)) for one in (old, new)]
        # A turn to write in, none to read in.
        await asyncio.sleep(0)
        engine.seal()
        await asyncio.gather(*calls)
        assert len(engine.calls) == 3
        assert engine.late == []


async def test_what_was_sent_under_the_seal_is_late_on_old_and_on_new_connections() -> None:
    engine = Living("decode")
    async with living(engine), line(engine.url) as old:
        await chat(old)
        engine.seal()
        async with line(engine.url) as new:
            await chat(old)
            await chat(new)
        assert engine.late == ["POST /v1/chat/completions"] * 2
        engine.unseal()
        await chat(old)
        assert len(engine.late) == 2


async def test_what_was_sent_under_the_seal_is_late_though_it_is_read_after_the_unsealing() -> None:
    engine = Living("decode")
    async with living(engine), line(engine.url) as old:
        await chat(old)
        engine.seal()
        call = asyncio.create_task(chat(old))
        await asyncio.sleep(0)
        engine.unseal()
        assert engine.late == []
        await call
        assert len(engine.late) == 1
