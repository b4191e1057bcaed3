"""`LLM` from the outside: what may be asked, when output ends, what an error leaves behind."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import modelbay
from modelbay import LLM, SamplingParams, hookimpl
from modelbay.errors import ArchitectureError, TokenizerError, UsageError
from modelbay.specs import ArchSpec
from modelbay_testing.tiny import tiny_checkpoint, tiny_tokenizer

TEXT = "A model is loaded, its layers"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm("llama")


def no_block_is_held(llm: LLM) -> bool:
    engine = llm.engine
    return (
        engine.kv.pool.num_free == engine.kv.pool.num_usable
        and not engine.requests
        and not engine.scheduler.has_work
        and len(engine.kv._free_slots) == llm.resolution.args.max_num_seqs
    )


def poison(token_id: int, value: float) -> Callable[[torch.nn.Module], torch.Tensor]:
    """Set a token's embedding, and return what it was: only requests with this token see the value."""

    def change(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            row = model.model.embed_tokens.weight[token_id]
            before = row.clone()
            row.copy_(torch.as_tensor(value) if isinstance(value, float) else value)
        return before

    return change


# -- prompts


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer()(TEXT)["input_ids"]
    expected = ids_of(llm.generate(TEXT, GREEDY)[0])
    for prompt in ({"prompt": TEXT}, {"prompt_token_ids": ids}, ids, [TEXT], [{"prompt": TEXT}], [ids]):
        (output,) = llm.generate(prompt, GREEDY)
        assert ids_of(output) == expected
        assert output.prompt_token_ids == ids
        assert output.prompt == (None if ids in (prompt, [prompt][0]) else output.prompt)
    assert [ids_of(output) for output in llm.generate([TEXT, {"prompt_token_ids": ids}], GREEDY)] == [expected] * 2
    assert llm.generate([], GREEDY) == []


def test_results_come_in_the_order_of_the_prompts_and_each_has_its_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 1, 4)]
    outputs = llm.generate([TEXT, "The quick", TEXT], params)
    assert [output.prompt for output in outputs] == [TEXT, "The quick", TEXT]
    assert [len(ids_of(output)) for output in outputs] == [9, 1, 4]
    assert len({output.request_id for output in outputs}) == 3
    with pytest.raises(UsageError, match="2 prompts and 1 sampling parameters"):
        llm.generate([TEXT, TEXT], [GREEDY])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [1, 256]}, "token id 256 at position 1 is outside .*: ids are 0 to 255"),
        ({"prompt_token_ids": [-1]}, "token id -1 at position 0"),
        ({"prompt_token_ids": [1, 2.5]}, "a string or a list of token ids"),
        ({"prompt": None}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either 'prompt' or 'prompt_token_ids'"),
        ({"text": "a"}, "either 'prompt' or 'prompt_token_ids', got text"),
        (7, "a prompt is a string"),
        ([TEXT, 7.5], "a string or a list of token ids, got float"),
        ({"prompt_token_ids": [5] * 512}, "has 512 tokens; with max_model_len=512 at most 511"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_and_nothing_runs(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(prompt, GREEDY)
    good = {"prompt_token_ids": [1, 5, 9]}
    with pytest.raises(UsageError, match=message):
        llm.generate([good, *(prompt if isinstance(prompt, list) else [prompt])], GREEDY)
    assert no_block_is_held(llm)


def test_t3_an_id_that_only_the_model_knows_is_legal_and_decodes_to_nothing(llm: LLM) -> None:
    assert len(llm.get_tokenizer()) < 255 < llm.resolution.config.vocab_size
    (output,) = llm.generate(
        {"prompt_token_ids": [1, 255]}, SamplingParams(temperature=0, max_tokens=3, logit_bias={255: 100})
    )
    assert ids_of(output) == [255] * 3
    assert output.outputs[0].text == ""


def test_a_long_prompt_is_cut_when_the_request_says_so(llm: LLM) -> None:
    long = [1, *range(3, 203), *range(3, 203), *range(3, 203)]
    (last,) = llm.generate({"prompt_token_ids": long}, GREEDY.replace(truncate_prompt_tokens=7))
    assert last.prompt_token_ids == long[-7:]
    (most,) = llm.generate({"prompt_token_ids": long}, GREEDY.replace(truncate_prompt_tokens=-1))
    assert most.prompt_token_ids == long[-511:]
    assert len(ids_of(most)) == 1


# -- chat


def test_chat_is_generate_on_the_rendered_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "The quick"}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt == "<s>user: The quick</s>assistant: "
    assert answer.prompt_token_ids[0] == 1
    assert answer.prompt_token_ids.count(1) == 1
    assert ids_of(answer) == ids_of(llm.generate({"prompt_token_ids": answer.prompt_token_ids}, GREEDY)[0])
    first, second = llm.chat([messages, [*messages, {"role": "assistant", "content": "fox"}, *messages]], GREEDY)
    assert ids_of(first) == ids_of(answer)
    assert second.prompt.startswith("<s>user: The quick</s>assistant: fox</s>")
    (own,) = llm.chat(messages, GREEDY, chat_template="{{ messages[0]['content'] }}")
    assert own.prompt == "The quick"


def test_t4_chat_without_a_template_says_so_and_completion_works(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    tiny_tokenizer(tmp_path / "bare", chat_template=None)
    with LLM(str(checkpoint("llama")), tokenizer=str(tmp_path / "bare")) as llm:
        with pytest.raises(TokenizerError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
        assert llm.generate(TEXT, GREEDY)[0].finished
        with pytest.raises(UsageError, match="at least one message"):
            llm.chat([])


# -- where output ends


def test_the_end_at_max_tokens_and_at_the_longest_sequence(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, GREEDY)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
    (full,) = llm.generate({"prompt_token_ids": [5] * 500}, GREEDY.replace(max_tokens=None))
    assert (len(ids_of(full)), full.outputs[0].finish_reason) == (12, "length")
    (last,) = llm.generate({"prompt_token_ids": [5] * 511}, GREEDY.replace(max_tokens=50))
    assert (len(ids_of(last)), last.outputs[0].finish_reason) == (1, "length")


def test_c10_the_model_s_end_token_ends_it_and_is_not_in_the_text(llm: LLM) -> None:
    wanted = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias={2: 100})
    (output,) = llm.generate(TEXT, wanted)
    assert ids_of(output)[-1] == 2
    assert len(ids_of(output)) == 4
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert "</s>" not in output.outputs[0].text
    assert len(ids_of(llm.generate(TEXT, wanted.replace(ignore_eos=True))[0])) == 9


def test_stop_tokens_and_stop_strings(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, GREEDY)
    ids, text = ids_of(whole), whole.outputs[0].text
    (by_id,) = llm.generate(TEXT, GREEDY.replace(stop_token_ids=[ids[4]]))
    end = ids.index(ids[4])
    assert (ids_of(by_id), by_id.outputs[0].finish_reason) == (ids[: end + 1], "stop")
    assert by_id.outputs[0].stop_reason == ids[4]
    stop = text[3:6]
    (by_text,) = llm.generate(TEXT, GREEDY.replace(stop=["not there", stop]))
    assert by_text.outputs[0].text == text[: text.index(stop)]
    assert (by_text.outputs[0].finish_reason, by_text.outputs[0].stop_reason) == ("stop", stop)
    (kept,) = llm.generate(TEXT, GREEDY.replace(stop=stop, include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[: text.index(stop) + 3]
    assert no_block_is_held(llm)


def test_c10_the_model_s_own_sampling_stands_in_for_what_a_request_does_not_say(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 3}))
    with LLM(str(checkpoint("llama")), generation_config=str(tmp_path)) as llm:
        greedy = ids_of(llm.generate(TEXT, GREEDY)[0])
        assert ids_of(llm.generate(TEXT)[0]) == greedy[:3]
        assert len(ids_of(llm.generate(TEXT, SamplingParams(max_tokens=5, ignore_eos=True))[0])) == 5
        assert llm.get_default_sampling_params().max_tokens == 3


# -- streaming and aborting


def test_a_stream_grows_to_what_generate_returns(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, GREEDY)
    texts = [output.outputs[0].text for output in llm.stream(TEXT, GREEDY)]
    assert texts[-1] == whole.outputs[0].text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(texts) == 12


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    with closing(llm.stream(TEXT, GREEDY.replace(n=3, temperature=1.0))) as stream:
        next(stream)
        next(stream)
        assert not no_block_is_held(llm)
    assert no_block_is_held(llm)


# -- the model, the process, the end


def test_a4_apply_model_returns_one_result_for_each_worker(llm: LLM) -> None:
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    (count,) = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))
    assert count == 106_816


def test_a_change_of_the_weights_is_seen_by_the_next_request(llm: LLM) -> None:
    """What the prefix cache kept was computed with the old ones."""
    prompt = {"prompt_token_ids": [1, *range(10, 60)]}
    before = ids_of(llm.generate(prompt, GREEDY)[0])
    (row,) = llm.apply_model(poison(20, 5.0))
    assert ids_of(llm.generate(prompt, GREEDY)[0]) != before
    llm.apply_model(poison(20, row))
    assert ids_of(llm.generate(prompt, GREEDY)[0]) == before


def test_the_load_report_accounts_for_every_tensor(open_llm: Callable[..., LLM]) -> None:
    for name in ("llama", "llama-tied", "qwen2"):
        report = open_llm(name).load_report
        assert not report.unaccounted()
        assert {use.status for use in report.tensors.values()} == {"loaded"}


def test_two_llms_in_one_process_share_nothing(open_llm: Callable[..., LLM]) -> None:
    plain = open_llm("llama")
    expected = ids_of(plain.generate(TEXT, GREEDY)[0])
    other = open_llm("qwen2", max_model_len=64, seed=9)
    theirs = ids_of(other.generate(TEXT, GREEDY)[0])
    same = open_llm("llama", hf_overrides={"rope_parameters": {"rope_theta": 77.0}})
    assert ids_of(same.generate(TEXT, GREEDY)[0]) != expected
    other.apply_model(poison(5, math.nan))
    same.close()
    assert ids_of(plain.generate(TEXT, GREEDY)[0]) == expected != theirs
    assert (plain.engine.max_model_len, other.engine.max_model_len) == (512, 64)
    assert plain.resolution.trace is not other.resolution.trace
    streams = [plain.stream(TEXT, GREEDY), other.stream("The quick", GREEDY)]
    for _ in range(12):
        mine, _ = (next(stream) for stream in streams)
    assert ids_of(mine) == expected


def test_close_gives_the_memory_back_and_says_so_afterwards(checkpoint: Callable[..., Path]) -> None:
    with LLM(str(checkpoint("llama"))) as llm:
        llm.generate(TEXT, GREEDY)
        model = weakref.ref(llm.engine.model)
        cache = weakref.ref(llm.engine.cache)
    llm.close()
    gc.collect()
    assert model() is None
    assert cache() is None
    for use in (lambda: llm.generate(TEXT), lambda: llm.load_report, lambda: llm.apply_model(type)):
        with pytest.raises(UsageError, match="this LLM was closed"):
            use()


def test_an_unknown_argument_names_the_nearest(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"'max_model_length'\. Did you mean 'max_model_len'"):
        LLM(str(checkpoint("llama")), max_model_length=5)


def test_a1_native_on_an_architecture_nobody_registered(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=64)
    with pytest.raises(
        ArchitectureError, match=r"model_impl=native cannot build 'GPT2LMHeadModel' .*no installed plugin"
    ):
        LLM(str(path), model_impl="native")


class Backwards(torch.nn.Module):
    """A model of the contract without attention: after token t comes token t - 1."""

    def __init__(self, config: Any, build: Any) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.scale = torch.nn.Parameter(torch.empty((), dtype=build.dtype, device="meta"), requires_grad=False)

    def forward(self, input_ids: Any, positions: Any, step: Any, inputs_embeds: Any = None) -> torch.Tensor:
        return input_ids[:, None].to(self.scale.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -self.scale * (torch.arange(self.vocab_size) - hidden + 1).abs()

    def kv_specs(self) -> Mapping[int, Any]:
        return {}


def test_a_plugin_in_the_process_serves_its_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM(plugins=[…])` adds to what is installed; nothing of it stays behind. A model that keeps nothing runs."""
    from safetensors.torch import save_file

    @hookimpl
    def register_architectures() -> list[ArchSpec]:
        return [ArchSpec(name="BackwardsForCausalLM", target="backwards_code:Backwards", model_types=("llama",))]

    code = types.ModuleType("backwards_code")
    code.Backwards = Backwards  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "backwards_code", code)
    plugin: Any = types.ModuleType("backwards_plugin")
    plugin.register_architectures = register_architectures
    values = {
        "architectures": ["BackwardsForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 8,
        "num_attention_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": 64, "dtype": "float32",
    }  # fmt: skip
    tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"scale": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), plugins=[plugin]) as llm:
        outputs = llm.generate([[1, 200], [90, 50]], SamplingParams(temperature=0, max_tokens=4))
        assert [ids_of(output) for output in outputs] == [[199, 198, 197, 196], [49, 48, 47, 46]]
        assert llm.resolution.owner is not None
    with pytest.raises(ArchitectureError, match="BackwardsForCausalLM"):
        LLM(str(tmp_path), model_impl="native")


def test_the_cache_is_said_in_one_log_line(checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="modelbay"), LLM(str(checkpoint("llama")), max_num_seqs=2) as llm:
        lines = [record.getMessage() for record in caplog.records if "KV cache" in record.getMessage()]
        assert lines == [
            "KV cache: up to 1 MiB as it fills, 64 blocks, 1,024 tokens (all that max_num_seqs=2 sequences can use)"
        ]
        decision = llm.resolution.trace.find("KV cache")
        assert decision is not None
        assert decision.answer in lines[0]


def test_metrics_are_in_order(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, GREEDY)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.time_to_first_token <= metrics.to_dict()["total_s"]
    assert json.loads(json.dumps(output.to_dict()))["outputs"][0]["token_ids"] == ids_of(output)


def test_the_public_names_are_lazy_and_the_same() -> None:
    from modelbay_runtime.llm import LLM as Real

    assert modelbay.LLM is Real
