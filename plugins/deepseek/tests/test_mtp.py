"""Speculative decoding from the layer for multi-token prediction: its logits, and that it changes no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelbay import LLM, SamplingParams, resolve
from modelbay.errors import UsageError
from modelbay_runtime.build import build_model
from modelbay_testing.tiny import tiny_checkpoint

MTP = {"method": "mtp", "num_speculative_tokens": 1}
LAYERS = 2
SIZES = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip


def checkpoint(path: Path, mixing: float) -> Path:
    """V3-like with a prediction layer, named and laid out as in the official repository.

    ``mixing`` scales what layers add to the embedding: with 0 a token follows from the one before it alone, and the
    prediction layer, which is given that one, is always right.
    """
    tiny_checkpoint(path, "deepseek_v3", **{**SIZES, "num_hidden_layers": LAYERS + 1})
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= mixing
    at = f"model.layers.{LAYERS}"
    generator = torch.Generator().manual_seed(7)
    noise = 0.02 * torch.randn(64, 128, generator=generator)
    tensors |= {
        f"{at}.enorm.weight": torch.ones(64),
        f"{at}.hnorm.weight": 1 + 0.1 * torch.randn(64, generator=generator),
        f"{at}.eh_proj.weight": torch.cat((torch.eye(64), torch.zeros(64, 64)), 1) + noise * mixing,
        f"{at}.shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{at}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{at}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sometimes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some guesses are right."""
    return checkpoint(tmp_path_factory.mktemp("mtp") / "model", 0.006)


@pytest.fixture(scope="module")
def hardly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers say much more than the embedding does."""
    return checkpoint(tmp_path_factory.mktemp("mtp") / "model", 0.35)


def prompts() -> list[dict[str, Any]]:
    ids = [[(7 * i * i + 3 * j) % 200 + 3 for i in range(length)] for j, length in enumerate((1, 5, 17, 40, 40))]
    ids[-1][:32] = ids[-2][:32]
    return [{"prompt_token_ids": each} for each in ids]


def opened(path: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "max_model_len": 128}
    return LLM(str(path), **{**defaults, **options})


def outputs(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[Any]:
    """Everything that a request brings but its times; log-probabilities rounded to what chunks may move."""
    found = []
    for output in llm.generate(prompts(), params, use_tqdm=False):
        for each in output.outputs:
            logprobs = [
                {token: round(entry.logprob, 3) for token, entry in position.items()}
                for position in each.logprobs or []
            ]
            found.append((list(each.token_ids), each.text, each.finish_reason, each.stop_reason, logprobs))
    return found


def drafted(llm: LLM, params: SamplingParams) -> tuple[int, int]:
    """Guesses made, and those that were right."""
    metrics = [output.metrics for output in llm.generate(prompts(), params, use_tqdm=False)]
    for each in metrics:
        rate = each.num_accepted_tokens / each.num_draft_tokens if each.num_draft_tokens else None
        assert each.acceptance_rate == rate
    return sum(each.num_draft_tokens for each in metrics), sum(each.num_accepted_tokens for each in metrics)


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


# ---- the layer ------------------------------------------------------------------------------------------------------


def written_out(path: Path, tokens: list[int]) -> torch.Tensor:
    """[T - 1, V]: the report's equations 21 to 23 for all positions at once, by Transformers' blocks: what is predicted
    of the token after the next one, from the model's hidden state of a position and the token behind it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors, at = load_file(path / "model.safetensors"), f"model.layers.{LAYERS}."
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(path, num_hidden_layers=LAYERS + 1)
    longer = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()

    def norm(x: torch.Tensor, weight: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * tensors[at + weight]

    with torch.inference_mode():
        ids = torch.tensor([tokens])
        hidden = model.model(ids).last_hidden_state[:, :-1]
        embeds = tensors["model.embed_tokens.weight"][ids[:, 1:]]
        both = torch.cat((norm(embeds, "enorm.weight"), norm(hidden, "hnorm.weight")), -1)
        x = both @ tensors[at + "eh_proj.weight"].T
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        x = longer.model.layers[LAYERS](
            x, attention_mask=mask, position_ids=positions, position_embeddings=longer.model.rotary_emb(x, positions)
        )
        x = x[0] if isinstance(x, tuple) else x
        return (norm(x, "shared_head.norm.weight") @ tensors["lm_head.weight"].T)[0]


@pytest.mark.parametrize("model", ["sometimes", "hardly"])
@pytest.mark.parametrize("chunk", [16, 2048])
def test_the_layers_logits_are_the_reports(chunk: int, model: str, request: pytest.FixtureRequest) -> None:
    """At every position where a token was guessed, whether those before were right or not, in chunks or at once."""
    found: dict[int, torch.Tensor] = {}
    path: Path = request.getfixturevalue(model)
    with opened(path, speculative_config=MTP, max_num_batched_tokens=chunk) as llm:
        module = llm.engine.model
        draft, logits = module.draft, module.draft_logits
        positions: list[int] = []

        def watched(hidden: Any, ids: Any, where: torch.Tensor, step: Any) -> Any:
            positions[:] = where.tolist()
            return draft(hidden, ids, where, step)

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            found[positions[-1]] = rows = logits(hidden)
            return rows

        module.draft, module.draft_logits = watched, recorded
        [output] = llm.generate([prompts()[3]], GREEDY, use_tqdm=False)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert output.metrics.num_draft_tokens == len(found)
        assert model == "hardly" or 0 < output.metrics.num_accepted_tokens < len(found)
    expected = written_out(path, tokens)
    for position, rows in found.items():
        assert (rows[0] - expected[position]).abs().max() <= 1e-4, position


def test_it_is_built_when_asked_and_counted(sometimes: Path) -> None:
    """One more layer keeps a latent per token, said by explain; without the flag the layer is skipped (case 33)."""
    said = {}
    for config in (None, MTP):
        resolution = resolve(str(sometimes), speculative_config=config)
        built = build_model(resolution)
        said[config is not None] = [str(d.answer) for d in resolution.trace.decisions if d.question == "cache"]
        assert len(built.kv_specs) == LAYERS + (config is not None)
    assert said[False] == ["LatentKV(size=40) × 2 layers: 320 bytes per token"]
    assert said[True] == ["LatentKV(size=40) × 3 layers: 480 bytes per token"]
    with opened(sometimes) as plain, opened(sometimes, speculative_config=MTP) as llm:
        assert "layer beyond num_hidden_layers" in plain.load_report.ignored_by_rule()
        assert llm.load_report.ignored_by_rule() == {"the draft layer's copy of the model's own": 2}
        assert llm.load_report.unaccounted() == []


# ---- what comes out --------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "greedy": ({}, GREEDY),
    "in chunks": ({"max_num_batched_tokens": 8}, GREEDY),
    "preempted": ({"kv_cache_memory_bytes": 12 * 16 * 40 * 3 * 4}, GREEDY),
    "one at a time": ({"max_num_seqs": 1}, GREEDY),
    "no prefix cache": ({"enable_prefix_caching": False}, GREEDY),
    "up to the longest": ({"max_model_len": 50}, SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)),
    "three tokens": ({}, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)),
    "seeds": ({}, SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True)),
    "several": ({}, SamplingParams(temperature=1.0, n=3, max_tokens=20, ignore_eos=True)),
    "logprobs": ({}, SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, max_tokens=20, ignore_eos=True)),
    "penalties": (
        {}, SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=40, ignore_eos=True)
    ),
    "min_tokens": ({}, SamplingParams(temperature=0, min_tokens=10, max_tokens=40)),
    "structured": ({}, SamplingParams(temperature=0, structured_outputs={"regex": "[^z]{5,60}"}, max_tokens=40)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_output_is_that_of_plain_decoding(case: str, sometimes: Path) -> None:
    """Twice in one engine, so that the second time finds its prefixes in the cache."""
    options, params = CASES[case]
    with opened(sometimes, **options) as plain:
        expected = [outputs(plain, params), outputs(plain, params)]
    with opened(sometimes, speculative_config=MTP, **options) as llm:
        found = [outputs(llm, params), outputs(llm, params)]
        made, right = drafted(llm, params)
        pool = llm.engine.kv.pool
        assert pool.num_free == pool.num_usable
        assert (llm.engine.scheduler.num_preemptions > 0) is (case == "preempted")
    assert found == expected
    assert 0 < right < made, "guesses were never, or always, right"


def test_a_stop_within_a_guess_ends_there(sometimes: Path) -> None:
    """The token after an accepted stop token is not drawn; nor is one beyond max_tokens."""
    with opened(sometimes) as plain:
        tokens = outputs(plain, GREEDY)[3][0]
        params = [
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[token]) for token in tokens
        ]
        expected = [plain.generate([prompts()[3]], each, use_tqdm=False)[0].outputs[0] for each in params[:12]]
    with opened(sometimes, speculative_config=MTP) as llm:
        found = [llm.generate([prompts()[3]], each, use_tqdm=False)[0].outputs[0] for each in params[:12]]
    assert [(o.token_ids, o.finish_reason, o.stop_reason) for o in found] == [
        (o.token_ids, o.finish_reason, o.stop_reason) for o in expected
    ]


def test_guesses_that_are_always_right_halve_the_steps(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", 0.0)
    steps = {}
    for config in (None, MTP):
        with opened(path, speculative_config=config) as llm:
            runner, count = llm.engine.runner, 0
            run = runner.run

            def counted(batch: Any, run: Any = run) -> Any:
                nonlocal count
                count += 1
                return run(batch)

            runner.run = counted
            [output] = llm.generate([prompts()[1]], GREEDY, use_tqdm=False)
            steps[config is not None] = count
    assert output.metrics.acceptance_rate == 1.0
    assert steps == {False: 40, True: 21}


def test_streams_grow_by_all_that_was_drawn(sometimes: Path) -> None:
    with opened(sometimes, speculative_config=MTP) as llm:
        whole = llm.generate([prompts()[2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        lengths, last = [], None
        for last in llm.stream(prompts()[2], GREEDY):
            lengths.append(len(last.outputs[0].token_ids))
    assert last is not None
    assert last.outputs[0].token_ids == whole
    assert lengths == sorted(lengths)


@pytest.mark.deep
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=str,
)
def test_d2_over_processes(sizes: dict[str, Any], sometimes: Path) -> None:
    """Ranks that share layers guess the same; replicas send their guesses along."""
    with opened(sometimes) as plain:
        expected = outputs(plain, GREEDY)
    with opened(sometimes, speculative_config=MTP, distributed_timeout_seconds=60, **sizes) as llm:
        found = outputs(llm, GREEDY)
        made, right = drafted(llm, GREEDY)
    assert found == expected
    assert 0 < right < made


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "eagle", "num_speculative_tokens": 1}, "the method 'eagle' is not served; mtp is"),
        ({"num_speculative_tokens": 1}, "the method None is not served"),
        ({"method": "mtp", "num_speculative_tokens": 3}, "num_speculative_tokens is 3; with mtp it is 1"),
        ({"method": "mtp", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "mtp", "model": "x/y"}, "speculative_config has model"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], message: str, sometimes: Path) -> None:
    with pytest.raises(UsageError, match=message):
        opened(sometimes, speculative_config=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_impl": "transformers"}, "as transformers builds it .* has no layer to draft with"),
        ({"hf_overrides": {"num_nextn_predict_layers": 0}}, "DeepseekV3ForCausalLM.* has no layer to draft with"),
        ({"pipeline_parallel_size": 2}, "not made over the stages of a pipeline"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "not made where replicas share experts"),
    ],
)
def test_a_model_or_mesh_that_cannot_draft_is_refused(options: dict[str, Any], message: str, sometimes: Path) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(resolve(str(sometimes), speculative_config=MTP, **options))


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"LlamaForCausalLM.* has no layer to draft with"):
        opened(tiny_checkpoint(tmp_path / "m", "llama"), speculative_config=MTP)
