"""X10: images and audio in the engine, against Transformers' Llama on embeddings that are merged by hand.

Each row of the feature table that crosses images and audio has its test here: chunked prefill, prefix cache,
preemption, logprobs, prompt logprobs, n > 1, stop strings, streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from modelbay import LLM, SamplingParams
from modelbay.errors import EngineError, UsageError
from modelbay_runtime.multimodal.data import MediaItem
from modelbay_runtime.multimodal.reader import MediaReader
from modelbay_testing.media import (
    AUDIO,
    IMAGE,
    DirectModel,
    audio_values,
    image_values,
    make_checkpoint,
    plugin,
)
from modelbay_testing.recording import record_logits

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def direct(folder: Path) -> DirectModel:
    return DirectModel(folder)


@pytest.fixture
def open_media(folder: Path) -> Iterator[Callable[..., LLM]]:
    """``open_media(bidirectional=True, max_num_batched_tokens=16)``"""
    with ExitStack() as stack:

        def opened(**options: Any) -> LLM:
            names = [name for name in ("bidirectional", "tight", "media_kinds") if name in options]
            module = stack.enter_context(plugin(**{name: options.pop(name) for name in names}))
            return stack.enter_context(LLM(str(folder), plugins=[module], **options))

        yield opened


def picture(seed: int, height: int = 20, width: int = 6) -> Image.Image:
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))


def sound(seed: int, rows: int = 5) -> tuple[np.ndarray, int]:
    return np.random.default_rng(seed).uniform(-1, 1, rows * 4).astype(np.float32), 16_000


def prompt_of(*parts: Any) -> tuple[dict[str, Any], list[int], list[torch.Tensor]]:
    """Token ids, images and (samples, rate) -> the prompt, its expanded ids, the placeholders' values."""
    short: list[int] = []
    expanded: list[int] = []
    values: list[torch.Tensor] = []
    data: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, list):
            short += part
            expanded += part
            continue
        token, kind = (AUDIO, "audio") if isinstance(part, tuple) else (IMAGE, "image")
        values.append(audio_values(part[0]) if isinstance(part, tuple) else image_values(part))
        data.setdefault(kind, []).append(part)
        short.append(token)
        expanded += [token] * len(values[-1])
    return {"prompt_token_ids": short, "multi_modal_data": data}, expanded, values


def ids(seed: int, count: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, 249, count - 1).tolist()]


@pytest.fixture(scope="module")
def cases() -> list[tuple[Any, list[int], list[torch.Tensor]]]:
    """Images, audio, both, the same image twice, one at the very end, and text alone."""
    return [
        prompt_of(ids(1, 7), picture(1), ids(2, 5)),
        prompt_of(ids(3, 4), sound(1), ids(4, 30)),
        prompt_of(ids(5, 3), picture(2, 9), ids(6, 4), sound(2), ids(7, 4), picture(1), ids(8, 2)),
        prompt_of([1], picture(3, 31), picture(3, 31), ids(9, 3)),
        prompt_of(ids(10, 18), picture(4, 40)),
        ({"prompt_token_ids": ids(11, 25)}, ids(11, 25), []),
    ]


def outputs_of(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    found = llm.generate(prompts, params, use_tqdm=False)
    return [completion.token_ids for output in found for completion in output.outputs]


def assert_greedy(direct: DirectModel, cases: list[Any], found: list[list[int]], tight: bool = False) -> None:
    """Every output is the likeliest, token by token."""
    for (_, expanded, values), output in zip(cases, found, strict=True):
        assert len(output) == 8
        assert output == direct.likeliest(expanded, values, output, tight)


@pytest.mark.parametrize("tight", [False, True], ids=["plain positions", "positions of several rows"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"enable_prefix_caching": False, "block_size": 5},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 128},
    ],
    ids=str,
)
def test_x10_mixed_batches_equal_merged_embeddings(
    tight: bool,
    options: dict[str, Any],
    open_media: Callable[..., LLM],
    direct: DirectModel,
    cases: list[Any],
) -> None:
    """Chunked prefill × multimodal: logits of every prompt token and greedy tokens, text requests in between."""
    llm = open_media(tight=tight, **options)
    with record_logits(llm) as recording:
        assert_greedy(direct, cases, outputs_of(llm, [prompt for prompt, _, _ in cases]), tight)
    for number, (_, expanded, values) in enumerate(cases):
        assert recording.positions(str(number))[-1] == len(expanded) + 6
        reference = direct.logits(expanded, values, tight)
        rows = {place: found for place, found in recording.rows[str(number), 0].items() if place < len(expanded)}
        worst = max(float((row - reference[place]).abs().max()) for place, found in rows.items() for row in found)
        assert worst < 2e-4
    pool = llm.engine.kv.pool
    assert pool.num_free == pool.num_usable


def test_text_alone_takes_the_plain_path(open_media: Callable[..., LLM]) -> None:
    llm = open_media()
    llm.generate([ids(1, 9)], GREEDY, use_tqdm=False)
    assert all(shape is not None and spans is None for shape, _, spans in llm.engine.model.seen)
    assert all(positions.ndim == 1 for _, positions, _ in llm.engine.model.seen)


def test_decode_steps_have_one_row_of_positions(open_media: Callable[..., LLM]) -> None:
    """Beyond the prompt a token's position is its place plus delta, in every row."""
    llm = open_media(tight=True)
    prompt, expanded, _ = prompt_of(ids(1, 5), picture(1), ids(2, 3))
    llm.generate([prompt], GREEDY, use_tqdm=False)
    first, *later = [positions for _, positions, _ in llm.engine.model.seen]
    assert first.shape == (3, len(expanded))
    assert [positions.tolist() for positions in later] == [[9 + step] for step in range(7)]


# ---- features are computed once -------------------------------------------------------------------------------------


def test_each_content_is_encoded_once(open_media: Callable[..., LLM]) -> None:
    """Over chunks, over requests in one batch, and over calls."""
    llm = open_media(max_num_batched_tokens=8)
    prompts = [prompt_of([1], picture(1), ids(seed, 5), picture(2))[0] for seed in range(3)]
    llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(llm.engine.model.encoded) == 2


def test_an_item_is_encoded_when_its_first_token_is_scheduled(open_media: Callable[..., LLM]) -> None:
    llm = open_media(max_num_batched_tokens=8)
    prompt = prompt_of(ids(1, 20), picture(1), ids(2, 20), picture(2))[0]
    engine = llm.engine
    counts: list[tuple[int, int]] = []
    run = engine.runner.run

    def counted(batch: Any) -> Any:
        output = run(batch)
        counts.append((int(batch.lengths[0]), len(engine.model.encoded)))
        return output

    engine.runner.run = counted  # type: ignore[method-assign]
    llm.generate([prompt], GREEDY, use_tqdm=False)
    assert [encoded for length, encoded in counts if length <= 20] == [0, 0]
    assert {encoded for length, encoded in counts if 20 < length <= 60} == {1}
    assert counts[-1][1] == 2


def test_features_beyond_the_limit_are_given_up_and_made_again(
    open_media: Callable[..., LLM], direct: DirectModel
) -> None:
    """The limit holds one picture's 20 rows of 64 float32; outputs do not change."""
    llm = open_media(media_cache_bytes=20 * 64 * 4, enable_prefix_caching=False)
    made = [prompt_of([1], picture(seed), ids(seed, 4)) for seed in (1, 2, 1)]
    assert_greedy(direct, made, [outputs_of(llm, [prompt])[0] for prompt, _, _ in made])
    store = llm.engine.runner.features
    assert (len(store), store.bytes, len(llm.engine.model.encoded)) == (1, 20 * 64 * 4, 3)
    assert_greedy(direct, made, outputs_of(llm, [prompt for prompt, _, _ in made]))  # both in one step
    assert store.bytes <= store.limit_bytes


def test_features_of_other_weights_are_not_used(open_media: Callable[..., LLM]) -> None:
    llm = open_media()
    prompt = prompt_of([1], picture(1), ids(1, 4))[0]
    before = outputs_of(llm, [prompt])
    llm.apply_model(lambda model: model.projection.mul_(-3))
    after = outputs_of(llm, [prompt])
    assert len(llm.engine.model.encoded) == 2
    assert before != after


def test_a_wrong_number_of_feature_rows_is_refused(
    open_media: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_media()
    encode = llm.engine.model.encode_media
    monkeypatch.setattr(llm.engine.model, "encode_media", lambda item: encode(item)[1:])
    with pytest.raises(EngineError, match=r"request '0': the encoder made 19 rows of its image, and .* has 20 tokens"):
        outputs_of(llm, [prompt_of([1], picture(1), ids(1, 4))[0]])
    assert outputs_of(llm, [[1, 5, 9]])


def test_what_the_encoder_raises_names_the_requests(
    open_media: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a server ends those, and no others."""
    llm = open_media()
    text = llm.stream([1, 5, 9], GREEDY)
    first = next(text)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "encode_media", lambda item: item.inputs["absent"])
        with pytest.raises(EngineError, match="request '1', '2': its image cannot be encoded: 'absent'"):
            outputs_of(llm, [prompt_of([1], picture(1), ids(seed, 4))[0] for seed in (1, 2)])
    rest = [output.outputs[0].token_ids for output in text]
    assert rest[-1] == outputs_of(llm, [[1, 5, 9]])[0]
    assert rest[-1][:1] == first.outputs[0].token_ids


# ---- prefix cache × multimodal --------------------------------------------------------------------------------------


def cached_tokens(llm: LLM, prompt: Any) -> int:
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.metrics is not None
    return output.metrics.num_cached_tokens


def test_equal_text_with_other_images_shares_nothing_beyond_the_text(
    open_media: Callable[..., LLM], direct: DirectModel
) -> None:
    llm = open_media(block_size=4)
    one, other = (prompt_of(ids(1, 8), picture(seed), ids(2, 9)) for seed in (1, 2))
    assert one[1] == other[1]
    assert cached_tokens(llm, one[0]) == 0
    assert cached_tokens(llm, other[0]) == 8
    assert cached_tokens(llm, one[0]) == 36  # all but the last block of 37 tokens
    assert_greedy(direct, [other, one], outputs_of(llm, [other[0], one[0]]))


def test_placeholders_written_as_text_share_nothing_with_images(open_media: Callable[..., LLM]) -> None:
    """The same ids without an image behind them are the same tokens with other embeddings."""
    llm = open_media(block_size=4)
    prompt, expanded, _ = prompt_of(ids(1, 4), picture(1), ids(2, 9))
    assert cached_tokens(llm, prompt) == 0
    assert cached_tokens(llm, {"prompt_token_ids": expanded}) == 4


def test_positions_are_part_of_a_prefix(open_media: Callable[..., LLM], direct: DirectModel) -> None:
    llm = open_media(block_size=4, tight=True)
    one = prompt_of(ids(1, 8), picture(1, 8), ids(2, 9))
    two = prompt_of(ids(1, 8), picture(1, 8), ids(2, 9), ids(3, 5))
    assert cached_tokens(llm, one[0]) == 0
    assert cached_tokens(llm, two[0]) == 24
    assert_greedy(direct, [two], outputs_of(llm, [two[0]]), tight=True)


def test_a_hit_inside_of_a_span_goes_on_with_the_kept_features(
    open_media: Callable[..., LLM], direct: DirectModel
) -> None:
    llm = open_media(block_size=4)
    one = prompt_of(ids(1, 6), picture(1))
    two = prompt_of(ids(1, 6), picture(1), ids(2, 9))
    assert cached_tokens(llm, one[0]) == 0
    assert cached_tokens(llm, two[0]) == 24  # of 26 tokens that are alike, whole blocks
    assert_greedy(direct, [one, two], outputs_of(llm, [one[0], two[0]]))


# ---- preemption, n > 1, logprobs, stop, streaming -------------------------------------------------------------------


@pytest.mark.parametrize("tight", [False, True])
def test_preempted_sequences_start_over_from_kept_features(
    tight: bool, open_media: Callable[..., LLM], direct: DirectModel, cases: list[Any]
) -> None:
    layout = open_media().engine.kv.layout
    blocks = layout.blocks_for(96, 16) + 1
    llm = open_media(
        tight=tight, max_model_len=96, max_num_batched_tokens=16, enable_prefix_caching=False,
        kv_cache_memory_bytes=blocks * layout.page_elements() * 4,
    )  # fmt: skip
    assert_greedy(direct, cases, outputs_of(llm, [prompt for prompt, _, _ in cases]), tight)
    assert llm.engine.scheduler.num_preemptions > 0
    assert len(llm.engine.model.encoded) == len(set(llm.engine.model.encoded)) == 6


def test_several_continuations_share_one_prompt(open_media: Callable[..., LLM], direct: DirectModel) -> None:
    """n > 1 × multimodal."""
    llm = open_media(block_size=4)
    case = prompt_of(ids(1, 7), picture(1), ids(2, 5))
    likeliest = SamplingParams(n=3, top_k=1, max_tokens=8, ignore_eos=True)
    assert_greedy(direct, [case] * 3, outputs_of(llm, [case[0]], likeliest))
    assert len(llm.engine.model.encoded) == 1


def test_logprobs_and_prompt_logprobs(open_media: Callable[..., LLM], direct: DirectModel) -> None:
    llm = open_media(max_num_batched_tokens=9)
    prompt, expanded, values = prompt_of(ids(1, 7), picture(1), ids(2, 5))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.prompt_token_ids) == expanded
    reference = direct.logits(expanded, values).log_softmax(-1)
    assert output.prompt_logprobs is not None
    for place in range(1, len(expanded)):
        entry = output.prompt_logprobs[place]
        assert entry is not None
        assert abs(entry[expanded[place]].logprob - float(reference[place - 1, expanded[place]])) < 1e-3
    [completion] = output.outputs
    assert completion.logprobs is not None
    token = completion.token_ids[0]
    assert abs(completion.logprobs[0][token].logprob - float(reference[-1, token])) < 1e-3


def test_stop_strings_and_streaming(open_media: Callable[..., LLM]) -> None:
    llm = open_media()
    prompt = prompt_of(ids(1, 7), picture(1), ids(2, 5))[0]
    whole = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].text
    grown = [output.outputs[0].text for output in llm.stream(prompt, GREEDY)]
    assert grown[-1] == whole
    assert all(grown[-1].startswith(text) for text in grown)
    stop = whole[2:4]
    stopped = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[stop])
    [output] = llm.generate([prompt], stopped, use_tqdm=False)
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert output.outputs[0].stop_reason == stop


# ---- spans that are seen both ways ----------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_bidirectional_spans_are_never_torn(caching: bool, open_media: Callable[..., LLM], cases: list[Any]) -> None:
    """Chunks end before a span or after it, whatever the budget; each span's tokens have one number in the step."""
    llm = open_media(bidirectional=True, max_num_batched_tokens=42, block_size=4, enable_prefix_caching=caching)
    for _ in range(2):  # the second time with prefixes that are cached
        outputs_of(llm, [prompt for prompt, _, _ in cases])
    lengths = {20, 5, 9, 31, 40}
    seen = [spans for _, _, spans in llm.engine.model.seen if spans is not None]
    assert seen
    for spans in seen:
        numbers, counts = torch.unique(spans[spans >= 0], return_counts=True)
        assert set(counts.tolist()) <= lengths
        assert numbers.tolist() == list(range(len(numbers)))


def test_a_prefix_hit_stops_before_a_bidirectional_span(open_media: Callable[..., LLM]) -> None:
    llm = open_media(bidirectional=True, block_size=4)
    one = prompt_of(ids(1, 10), picture(1), ids(2, 2))[0]
    two = prompt_of(ids(1, 10), picture(1), ids(3, 9))[0]
    assert cached_tokens(llm, one) == 0
    assert cached_tokens(llm, one) == 8  # of 32 tokens 28 are cached, and the span is 10 to 30
    assert cached_tokens(llm, two) == 8  # block 28 has tokens of the text, which differ
    after = prompt_of(ids(1, 10), picture(1), ids(2, 2), ids(4, 9))[0]
    assert cached_tokens(llm, after) == 32


def test_a_span_that_no_step_has_room_for_is_refused(open_media: Callable[..., LLM]) -> None:
    llm = open_media(bidirectional=True, max_num_batched_tokens=16)
    with pytest.raises(UsageError, match=r"20 tokens.*at most 16.*Raise max_num_batched_tokens to 20"):
        outputs_of(llm, [prompt_of([1], picture(1), ids(1, 4))[0]])
    assert outputs_of(llm, [prompt_of([1], picture(1, 16), ids(1, 4))[0]])


# ---- what is refused, by name ---------------------------------------------------------------------------------------


def test_text_alone_to_a_model_that_reads_images_only_is_refused(open_media: Callable[..., LLM]) -> None:
    llm = open_media()
    needs = SimpleNamespace(media_kinds=("image",), needs_media=True)
    llm.engine.media = MediaReader(llm.resolution, llm.engine.tokenizer, needs)
    with pytest.raises(UsageError, match="does not run on text alone"):
        llm.generate("only words", GREEDY)
    with pytest.raises(UsageError, match="does not run on text alone"):
        llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    assert not llm.engine.requests


def test_a_text_model_takes_no_images(checkpoint: Callable[[str], Path]) -> None:
    with LLM(str(checkpoint("llama"))) as llm:
        with pytest.raises(UsageError, match="has an image, and LlamaForCausalLM takes text only"):
            llm.generate({"prompt": "a", "multi_modal_data": {"image": picture(1)}}, GREEDY)
        assert outputs_of(llm, [{"prompt": "a", "multi_modal_data": {}}])


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"image": [], "audio": sound(1)}, "has audio, and TinyMediaForCausalLM takes text, image only"),
        ({"video": [1]}, "image and audio, got 'video'"),
        ({"image": [picture(1)] * 3}, "3 items of kind image; at most 2 are taken"),
        ([picture(1)], "a mapping of image and audio, got list"),
        ({"image": 3}, "got int"),
        ({"image": [picture(1)] * 2}, "fewer placeholders"),
        ({"image": None}, None),
    ],
    ids=["audio", "video", "too-many", "no-mapping", "a-number", "too-few-placeholders", "null"],
)
def test_unsupported_media_are_refused_by_name(data: Any, match: str | None, open_media: Callable[..., LLM]) -> None:
    llm = open_media(media_kinds=("image",), limit_mm_per_prompt={"image": 2})
    prompt = {"prompt_token_ids": [1, IMAGE, 5] if match else [1, 5], "multi_modal_data": data}
    if match is None:
        assert outputs_of(llm, [prompt])
        return
    with pytest.raises(UsageError, match=match):
        llm.generate(prompt, GREEDY)


def test_one_bad_prompt_of_several_is_named_and_nothing_is_left(open_media: Callable[..., LLM]) -> None:
    llm = open_media()
    good = prompt_of([1], picture(1), ids(1, 4))[0]
    bad = {"prompt_token_ids": [1, IMAGE], "multi_modal_data": {"image": b"no image"}}
    with pytest.raises(UsageError, match=r"^prompt 1: image: 8 bytes that are no image"):
        llm.generate([good, bad], GREEDY)
    assert not llm.engine.scheduler.has_work
    assert outputs_of(llm, [good])


def test_truncation_does_not_tear_images(open_media: Callable[..., LLM]) -> None:
    llm = open_media()
    prompt = prompt_of([1], picture(1), ids(1, 4))[0]
    with pytest.raises(UsageError, match="truncate_prompt_tokens would tear"):
        llm.generate(prompt, SamplingParams(max_tokens=2, truncate_prompt_tokens=10))


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "multi_modal_uuids"])
def test_what_would_change_the_output_is_not_passed_over(name: str, open_media: Callable[..., LLM]) -> None:
    with pytest.raises(UsageError, match=name):
        open_media().generate({"prompt_token_ids": [1, 5], name: {"a": 1}}, GREEDY)


def test_what_the_processor_raises_is_the_request_s_fault(
    open_media: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_media()
    monkeypatch.setattr(type(llm.engine.media.processor), "__call__", lambda *_, **__: 1 / 0)
    with pytest.raises(UsageError, match="processor refuses the images or audio: division by zero"):
        llm.generate(prompt_of([1], picture(1))[0], GREEDY)


def test_media_items_are_plain_data() -> None:
    """A batch is sent to other ranks."""
    import pickle

    item = MediaItem("image", b"digest", {"values": torch.ones(2, 4)})
    assert torch.equal(pickle.loads(pickle.dumps(item)).inputs["values"], item.inputs["values"])


def test_among_ranks_what_cannot_be_encoded_ends_its_request_alone(
    open_media: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error on one rank would leave the others in the middle of the step: the step is computed, on NaN."""
    llm = open_media()
    llm.engine.runner.features.among_ranks = True
    expected = outputs_of(llm, [[1, 5, 9]])
    prompt = prompt_of([1], picture(1), ids(1, 4))[0]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "encode_media", lambda item: item.inputs["absent"])
        stream = llm.stream([1, 5, 9], GREEDY)
        next(stream)
        with pytest.raises(EngineError, match="not usable for request '2'"):
            outputs_of(llm, [prompt])
        assert [output.outputs[0].token_ids for output in stream][-1] == expected[0]
    assert "request '2': its image cannot be encoded: 'absent'" in caplog.text
    assert outputs_of(llm, [prompt])  # nothing is kept of the failure
