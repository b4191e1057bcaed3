"""Chat messages with images and audio: parts as OpenAI and Transformers write them, templates of either kind, the flags
of the commands, and what a client of a server may name."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner
from PIL import Image

from modelbay import LLM, SamplingParams
from modelbay.errors import UsageError
from modelbay_runtime.multimodal.messages import read_messages
from modelbay_testing.media import AUDIO, IMAGE, make_checkpoint, plugin

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def picture(seed: int = 1) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 4, 3), np.uint8))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.png and a.wav"""
    folder = tmp_path_factory.mktemp("files")
    picture().save(folder / "a.png")
    soundfile.write(folder / "a.wav", np.random.default_rng(2).uniform(-1, 1, 20), 16_000)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with plugin() as module, LLM(str(folder), plugins=[module]) as found:
        yield found


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def base64_of(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def image_parts(path: Path) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": data_url(path)}},
        {"type": "image_url", "image_url": {"url": path.as_uri(), "detail": "low"}},
        {"type": "image_url", "image_url": data_url(path)},
        {"type": "image", "image": Image.open(path)},
        {"type": "image", "image": path.read_bytes()},
        {"type": "image", "path": str(path)},
        {"type": "image", "path": path},
        {"type": "image", "url": path.as_uri()},
        {"type": "image", "base64": base64_of(path)},
    ]


def audio_parts(path: Path) -> list[dict[str, Any]]:
    samples, rate = soundfile.read(path, dtype="float32")
    return [
        {"type": "input_audio", "input_audio": {"data": base64_of(path), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": path.as_uri()}},
        {"type": "audio", "audio": (samples, rate)},
        {"type": "audio", "path": str(path)},
        {"type": "audio", "audio": path},
    ]


def test_every_form_of_a_part_gives_the_same_prompt(llm: LLM, files: Path) -> None:
    for parts, token, rows in (
        (image_parts(files / "a.png"), IMAGE, 6),
        (audio_parts(files / "a.wav"), AUDIO, 5),
    ):
        prompts = [llm.render([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]) for part in parts]
        first = prompts[0]
        assert first.token_ids.count(token) == rows
        assert first.media is not None
        for prompt in prompts:
            assert prompt.media is not None
            assert prompt.token_ids == first.token_ids
            assert [item.digest for item in prompt.media.items] == [item.digest for item in first.media.items]


def test_chat_is_generate_with_the_rendered_prompt(llm: LLM, files: Path) -> None:
    """T4: exactly one BOS, placeholders where the template puts them, media in the order of the messages."""
    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture(1)}, {"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": ["three", {"type": "image", "image": picture(2)}]},
    ]
    prompt = llm.render(messages)
    assert prompt.text == "<s>user: <image>one</s>assistant: two</s>user: three<image></s>assistant: "
    assert prompt.token_ids.count(1) == 1
    by_hand = {"prompt": prompt.text, "multi_modal_data": {"image": [picture(1), picture(2)]}}
    [chatted], [generated] = llm.chat(messages, GREEDY, use_tqdm=False), llm.generate(by_hand, GREEDY, use_tqdm=False)
    assert chatted.prompt_token_ids == generated.prompt_token_ids
    assert chatted.outputs[0].token_ids == generated.outputs[0].token_ids
    without = {**by_hand, "prompt": prompt.text.removeprefix("<s>")}
    assert llm.generate(without, GREEDY, use_tqdm=False)[0].prompt_token_ids == generated.prompt_token_ids


def test_text_alone_is_given_as_parts_where_the_template_takes_parts(llm: LLM) -> None:
    text = llm.render([{"role": "user", "content": "hello"}])
    parts = llm.render([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert text == parts
    assert text.text == "<s>user: hello</s>assistant: "


def test_parts_of_text_become_one_text_where_the_template_takes_texts(llm: LLM, files: Path) -> None:
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    content: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert llm.render([{"role": "user", "content": content}], chat_template=template).text == "user: a\nb"
    with pytest.raises(UsageError, match=r"the chat template takes texts, and the messages have image.*multi_modal"):
        llm.render([{"role": "user", "content": [*content, image_parts(files / "a.png")[0]]}], chat_template=template)


def test_the_processor_s_template_serves_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with plugin() as module, LLM(str(folder), plugins=[module]) as llm:
        assert llm.render([{"role": "user", "content": "hello"}]).text == "<s>user: hello</s>assistant: "


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "of type 'video_url'.*Known: text, image_url"),
        ({"text": "a"}, 'is {"type": …}'),
        (3, "got int"),
        ({"type": "text", "text": 3}, "a string"),
        ({"type": "image_url"}, "image_url has"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url has"),
        ({"type": "input_audio", "input_audio": {"data": "!!!", "format": "wav"}}, "not base64"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio has"),
        ({"type": "image"}, "one of image, url, path and base64, got none"),
        ({"type": "image", "image": b"", "path": "a"}, "one of image, url, path and base64, got image, path"),
        ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "example.com are not fetched"),
    ],
    ids=str,
)
def test_parts_that_are_none_are_refused(part: Any, match: str, llm: LLM) -> None:
    with pytest.raises(UsageError, match=match):
        llm.render([{"role": "user", "content": [part]}])


def test_placeholders_in_the_text_are_not_taken_for_images(llm: LLM) -> None:
    parts = [{"type": "text", "text": "<image>"}, {"type": "image", "image": picture()}]
    with pytest.raises(UsageError, match="more placeholders"):
        llm.render([{"role": "user", "content": parts}])


def test_a_client_names_no_files_and_the_caller_does(llm: LLM, files: Path) -> None:
    for part in image_parts(files / "a.png"):
        message = [{"role": "user", "content": [part]}]
        allowed = "base64" in part or "data:" in str(part) or isinstance(part.get("image"), bytes | Image.Image)
        if allowed:
            assert llm.render(message, untrusted=True).media is not None
        else:
            with pytest.raises(UsageError, match="files of the server"):
                llm.render(message, untrusted=True)


def test_what_is_read_is_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "image", "image": b"a"}], "name": "n"}
    found = read_messages([message])
    assert message["content"] == [{"type": "image", "image": b"a"}]
    assert found.messages == [{"role": "user", "content": [{"type": "image"}], "name": "n"}]
    assert found.items == {"image": [b"a"]}


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> Any:
    """The commands, on the one model that is open."""
    from modelbay_runtime.cli.chat import command as chat
    from modelbay_runtime.cli.generate import command as generate

    class Open:
        llm: LLM

        def __enter__(self) -> LLM:
            return self.llm

        def __exit__(self, *_: object) -> None:
            """It goes on."""

    Open.llm = llm
    monkeypatch.setattr("modelbay_runtime.cli.opening.open_llm", lambda *_: Open())
    commands = {"generate": generate, "chat": chat}

    def run(name: str, *args: str, stdin: str = "") -> Any:
        return CliRunner().invoke(commands[name], ["model", *args], input=stdin)

    return run


def test_generate_takes_images_and_audio(command: Any, llm: LLM, files: Path) -> None:
    given = ["--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json"]
    media = ["--image", str(files / "a.png"), "--image", str(files / "a.png"), "--audio", str(files / "a.wav")]
    found = command("generate", "--prompt", "a<image><image>b<audio>", *media, *given)
    assert found.exit_code == 0, found.output
    [output] = json.loads(found.stdout)
    prompt = {
        "prompt": "a<image><image>b<audio>",
        "multi_modal_data": {"image": [files / "a.png"] * 2, "audio": files / "a.wav"},
    }
    [wanted] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output["prompt_token_ids"] == list(wanted.prompt_token_ids)
    assert output["outputs"][0]["token_ids"] == wanted.outputs[0].token_ids


def test_generate_puts_images_before_the_text_of_a_conversation(command: Any, files: Path) -> None:
    found = command(
        "generate", "--chat", "--prompt", "what?", "--image", str(files / "a.png"), "--max-tokens", "2", "--json"
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)[0]["prompt"] == "<s>user: <image>what?</s>assistant: "


def test_generate_refuses_a_file_that_is_not_there(command: Any) -> None:
    found = command("generate", "--prompt", "<image>", "--image", "no/such.png")
    assert isinstance(found.exception, UsageError)
    assert "'no/such.png' is not a file" in str(found.exception)


def test_chat_takes_an_image_with_the_next_message(
    command: Any, llm: LLM, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str | None] = []
    render = llm.render

    def recorded(messages: Any, **kwargs: Any) -> Any:
        prompt = render(messages, **kwargs)
        rendered.append(prompt.text)
        return prompt

    monkeypatch.setattr(llm, "render", recorded)
    lines = f"/image {files}/a.png\n/image no/such.png\n/audio {files}/a.wav\nwhat?\n/image\n/clear\nbye\n"
    found = command("chat", "--max-tokens", "2", "--temperature", "0", stdin=lines)
    assert found.exit_code == 0, found.output
    assert "no/such.png' is not a file" in found.output
    assert rendered[1] == "<s>user: <image><audio>what?</s>assistant: "
    assert rendered[-1] == "<s>user: bye</s>assistant: "


def test_the_flags_of_the_engine_arguments() -> None:
    from modelbay.args import EngineArgs

    made = EngineArgs.create("m", allowed_media_domains=["a.org"], limit_mm_per_prompt={"image": 3, "audio": 0})
    assert made.allowed_media_domains == ["a.org"]
    for name, value in (
        ("allowed_media_domains", "a.org"), ("allowed_media_domains", [3]), ("limit_mm_per_prompt", {"video": 1}),
        ("limit_mm_per_prompt", {"image": -1}), ("limit_mm_per_prompt", {"image": "2"}), ("media_cache_bytes", -1),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=name):
            EngineArgs.create("m", **{name: value})


def test_hosts_are_one_flag_separated_by_commas() -> None:
    import click

    from modelbay.cli.options import engine_kwargs_from, engine_options

    @click.command()
    @engine_options
    @click.pass_context
    def shown(ctx: click.Context, **options: Any) -> None:
        click.echo(repr(engine_kwargs_from(ctx, options).get("allowed_media_domains")))

    assert CliRunner().invoke(shown, ["--allowed-media-domains", "a.org, b.org"]).output == "('a.org', 'b.org')\n"


def test_bytes_that_a_file_has_are_what_counts(llm: LLM) -> None:
    """An equal image in another file format is the same content."""
    first, second = io.BytesIO(), io.BytesIO()
    picture().save(first, "PNG")
    picture().save(second, "BMP")
    prompts = [
        llm.render([{"role": "user", "content": [{"type": "image", "image": file.getvalue()}]}])
        for file in (first, second)
    ]
    digests = [prompt.media.items[0].digest for prompt in prompts if prompt.media is not None]
    assert digests[0] == digests[1]
