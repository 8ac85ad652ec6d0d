from __future__ import annotations

import pytest

from epd_proxy.simulator import ROLES, Simulator
from tests.simulator.bodies import (
    CLIP,
    RED,
    Json,
    ask,
    assert_refused,
    audio,
    chat,
    data_url,
    url_part,
)

REFUSED = [
    (chat(url_part("file:///etc/passwd")), None, "Cannot load local files"),
    (chat(url_part("ftp://a/b.png")), None, "The URL must be either"),
    (chat(url_part("b.png")), None, "The URL must be either"),
    (chat(url_part("data:image/png;base64")), None, "Invalid data URL"),
    (chat(url_part("data:image/png;base64,iVBO\nRw0K")), None, "Non-base64 digit found"),
    (chat(url_part("data:image/png;base64,iVBORw0")), None, "Non-base64 digit found"),
    (chat(url_part("data:image/png;base64,é")), None, "Non-base64 digit found"),
    (chat(url_part(data_url(b"a picture"))), None, "Failed to load image"),
    (chat(url_part(data_url(b"\x89PNG\r\n\x1a\n"))), None, "Failed to load image"),
    (chat(url_part("data:video/mp4;base64,", "video_url")), None, "Failed to load video"),
    (chat(audio("not base64!")), None, "Non-base64 digit found"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("role", ROLES)
async def test_a_url_that_cannot_be_read_is_a_400(
    role: str, body: Json, param: str | None, message: str
) -> None:
    await assert_refused(Simulator(role), body, param, message)


@pytest.mark.parametrize("url", ["data:,x", "data:image/png,x", "data:image/png;BASE64,AA=="])
async def test_a_data_url_without_base64_is_a_501(url: str) -> None:
    answer = await ask(Simulator("encode"), chat(url_part(url)))

    assert answer.status_code == 501
    assert answer.json() == {
        "error": {
            "message": "Only base64 data URLs are supported for now.",
            "type": "NotImplementedError",
            "param": None,
            "code": 501,
        }
    }


ACCEPTED = [
    chat(url_part("DATA:image/png;charset=utf-8;base64," + RED.partition(",")[2])),
    chat(url_part(data_url(b"\xff\xd8\xff a JPEG", "image/jpeg"))),
    chat(url_part(data_url(b"GIF89a", "image/gif"))),
    chat(url_part(data_url(b"RIFF1234WEBP", "image/webp"))),
    chat(url_part(CLIP, "video_url"), url_part("https://a/b.wav", "audio_url")),
]


@pytest.mark.parametrize("body", ACCEPTED, ids=range(len(ACCEPTED)))
@pytest.mark.parametrize("role", ROLES)
async def test_media_that_vllm_reads_are_accepted(role: str, body: Json) -> None:
    answer = await ask(Simulator(role, model="*"), body)
    assert answer.status_code == 200, answer.text
