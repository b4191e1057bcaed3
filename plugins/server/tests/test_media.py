"""Images and audio in chat requests: what the caller of `LLM.chat` gets, and no file or host that is not allowed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelbay import LLM, SamplingParams
from modelbay_testing.media import make_checkpoint, plugin


def picture(seed: int = 1) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 4, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asking(url: str, text: str = "what?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"model": "media", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("media"))


@pytest.fixture
def media_server(folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    allowed = folder / "allowed"
    allowed.mkdir(exist_ok=True)
    (allowed / "a.png").write_bytes(picture())
    with plugin() as module:
        yield serve((folder, "media"), engine={"plugins": [module], "allowed_local_media_path": str(allowed)})


def test_an_answer_is_what_the_model_says_of_the_image(media_server: Any, folder: Path) -> None:
    answers = [
        media_server.post("/v1/chat/completions", asking(url)).json()["choices"][0]["message"]["content"]
        for url in (data_url(picture()), (folder / "allowed" / "a.png").as_uri(), data_url(picture(2)))
    ]
    with plugin() as module, LLM(str(folder), plugins=[module], dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        wanted = [llm.chat(asking(data_url(picture(seed)))["messages"], params)[0].outputs[0].text for seed in (1, 2)]
    assert answers == [wanted[0], wanted[0], wanted[1]]


def test_a_bad_image_fails_its_own_request_alone(media_server: Any) -> None:
    for url, match in (
        ("file:///etc/passwd", "only files below allowed_local_media_path"),
        ("/etc/passwd", "only files below allowed_local_media_path"),
        ("http://localhost:9/a.png", "media of localhost are not fetched"),
        ("data:image/png;base64,AAAA", "no image"),
        ("data:image/png;base64,!", "not base64"),
    ):
        answer = media_server.post("/v1/chat/completions", asking(url))
        assert answer.status_code == 400
        assert match in answer.json()["error"]["message"]
    assert media_server.post("/v1/chat/completions", asking(data_url(picture()))).status_code == 200


def test_other_parts_are_refused_by_name(media_server: Any) -> None:
    for part in ({"type": "image", "path": "/etc/passwd"}, {"type": "video_url", "video_url": {"url": "data:,"}}):
        body = {"model": "media", "messages": [{"role": "user", "content": [part]}]}
        answer = media_server.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert repr(part["type"]) in answer.json()["error"]["message"]
