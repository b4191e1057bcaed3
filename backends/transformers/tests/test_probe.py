"""The probe: what it reads off a model, and every rule that a model can break, before any weight is there (X1-X4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modelbay.errors import BackendError
from modelbay_transformers import dispatch
from modelbay_transformers.meta import build_on_meta
from modelbay_transformers.probe import ProbeResult, probe

HIDDEN, HEADS, SIZE, VOCAB = 32, 4, 8, 64


class FakeConfig(PretrainedConfig):
    model_type = "modelbay_probe_fake"
    hidden_size = HIDDEN
    num_hidden_layers = 2
    vocab_size = VOCAB


def eager(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
    scores = q @ k.transpose(-1, -2) * SIZE**-0.5
    return (scores.softmax(-1) @ v).transpose(1, 2), None


class FakeAttention(nn.Module):
    """What a test changes: ``arguments`` of the call, ``calls``, ``mask``."""

    def __init__(self, config: Any, layer_idx: Any) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.arguments: dict[str, Any] = {"scaling": 0.25}
        self.calls = 1
        self.mask: Callable[[Any], Any] = lambda mask: mask

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q = q * position_ids[:, None, :, None].cos()
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        for _ in range(self.calls):
            out, _ = attend(self, q, k, v, self.mask(mask), **self.arguments)
        return out.flatten(2) if self.calls else x


class FakeModel(PreTrainedModel):
    config_class = FakeConfig
    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([FakeAttention(config, i) for i in range(config.num_hidden_layers)])
        self.make_mask: Callable[..., Any] = create_causal_mask
        self.mix: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self.post_init()

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        x = self.embed(input_ids)
        mask = self.make_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=position_ids
        )
        for layer in self.layers:
            x = self.mix(x + layer(x, position_ids=position_ids, mask=mask, **kwargs))
        return BaseModelOutput(last_hidden_state=x)


def fake(**config: Any) -> Any:
    dispatch.register()
    return build_on_meta(FakeModel, FakeConfig(**config), dispatch.ATTENTION, torch.float32)


def refused(model: nn.Module, **kwargs: Any) -> str:
    with pytest.raises(BackendError) as error:
        probe(model, **kwargs)
    return error.value.message


def test_x1_the_probe_reads_every_layer_and_touches_no_parameter() -> None:
    model = fake()
    result: ProbeResult = probe(model)
    assert [(f.name, f.layer, f.num_heads, f.head_size, f.causal) for f in result.attention] == [
        ("layers.0", 0, HEADS, SIZE, True),
        ("layers.1", 1, HEADS, SIZE, True),
    ]
    assert result.hidden_size == HIDDEN
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert model.config._attn_implementation == dispatch.ATTENTION
    for layer in ("layers.0", "layers.1"):  # q, k, v of a layer are given the very same tensor
        assert len({result.linears[f"{layer}.{name}"][0] for name in "qkv"}) == 1


def test_x2_attention_that_is_never_called() -> None:
    model = fake()
    for layer in model.layers:
        layer.calls = 0
    assert "never calls attention" in refused(model)


def test_x2_attention_that_is_called_twice() -> None:
    model = fake()
    model.layers[1].calls = 2
    assert refused(model) == ("layers.1 calls attention more than once in one forward; each module may call it once.")


def test_x2_a_shared_module_may_attend_again_where_nothing_is_kept() -> None:
    model = fake()
    model.make_mask = create_bidirectional_mask_of
    model.layers[1] = model.layers[0]
    assert [facts.causal for facts in probe(model).attention] == [False]


def test_x2_layers_that_share_a_layer_idx() -> None:
    model = fake()
    model.layers[1].layer_idx = 0
    assert "layers.1 and layers.0 have the same layer_idx 0" in refused(model)


@pytest.mark.parametrize("index", [None, "1", True])
def test_x2_a_layer_without_an_integer_layer_idx(index: Any) -> None:
    model = fake()
    model.layers[1].layer_idx = index
    assert "layers.1 has no integer layer_idx" in refused(model)


def test_x2_a_layer_that_does_not_attend_among_layers_that_do() -> None:
    """As of a model whose other layers keep a state."""
    model = fake(num_hidden_layers=3)
    model.layers[1].calls = 0
    assert "2 of 3 layers call attention" in refused(model)
    assert "layers.1 (FakeAttention) does not" in refused(model)


def test_x1_a_mask_of_its_own() -> None:
    model = fake()
    model.layers[0].mask = lambda mask: torch.zeros(1, 1, 11, 11)
    assert "brings an attention mask of its own (shape (1, 1, 11, 11))" in refused(model)


def test_x1_a_change_of_transformers_mask_is_a_mask_of_its_own() -> None:
    model = fake()
    model.layers[0].mask = lambda mask: None if mask is None else ~mask
    assert "mask of its own" in refused(model)


@pytest.mark.parametrize("name", ["position_bias", "alibi", "head_mask"])
def test_x3_an_attention_argument_that_is_not_known(name: str) -> None:
    model = fake()
    model.layers[0].arguments = {name: torch.ones(1)}
    assert refused(model) == f"layers.0 gives its attention {name}, which is not known here."


def test_x3_arguments_are_read_and_absent_scaling_is_the_head_size() -> None:
    model = fake()
    sinks = torch.zeros(HEADS)
    model.layers[0].arguments = {"softcap": 30.0, "s_aux": sinks, "dropout": 0.0, "output_attentions": False}
    first, second = probe(model).attention
    assert (first.scaling, first.softcap, first.sinks) == (SIZE**-0.5, 30.0, True)
    assert (second.scaling, second.softcap, second.sinks) == (0.25, None, False)


def test_x3_the_window_is_what_the_mask_hides_even_if_no_argument_says_it() -> None:
    model = fake(sliding_window=5)
    model.make_mask = create_sliding_window_causal_mask
    assert [facts.window for facts in probe(model).attention] == [5, 5]


def test_x3_an_argument_alone_gives_the_window() -> None:
    model = fake()
    model.make_mask = lambda **kwargs: None
    model.layers[0].arguments = {"sliding_window": 7}
    assert [facts.window for facts in probe(model).attention] == [7, None]


def create_bidirectional_mask_of(*, position_ids: Any, **kwargs: Any) -> Any:
    return create_bidirectional_mask(**kwargs)


def test_x4_what_the_mask_says_of_the_direction_beats_the_attribute() -> None:
    model = fake()
    model.make_mask = create_bidirectional_mask_of
    assert all(layer.is_causal for layer in model.layers)
    assert [facts.causal for facts in probe(model).attention] == [False, False]


def test_x4_is_causal_false_without_a_mask() -> None:
    model = fake()
    model.make_mask = lambda **kwargs: None
    for layer in model.layers:
        layer.is_causal = False
    assert not any(facts.causal for facts in probe(model).attention)


def test_x4_causal_and_bidirectional_layers_in_one_model() -> None:
    model = fake()
    model.make_mask = lambda **kwargs: None
    model.layers[1].is_causal = False
    assert "causal and bidirectional layers" in refused(model)


def test_chunks_are_refused_where_a_sequence_may_be_longer_than_one() -> None:
    model = fake(attention_chunk_size=16)
    model.make_mask = create_chunked_causal_mask
    with pytest.raises(BackendError, match="hides keys by a rule of its own") as error:
        probe(model, longest=100)
    assert error.value.hint == "In 16 tokens it does not show: give max_model_len=16 or less."
    assert all(facts.window is None for facts in probe(model, longest=16).attention)


@pytest.mark.parametrize(
    ("mix", "how"),
    [
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x, "a product over tokens"),
        (lambda x: nn.functional.pad(x[:, :-1], (0, 0, 1, 0)), "a shift or padding of tokens"),
        (lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1), "a shift of tokens"),
        (lambda x: torch.roll(x, 1, 1), "roll"),
        (
            lambda x: torch.conv1d(x.mT, torch.empty(HIDDEN, 1, 3, device="meta"), padding=1, groups=HIDDEN).mT,
            "a convolution",
        ),
    ],
)
def test_tokens_that_are_mixed_outside_of_attention(mix: Callable[[torch.Tensor], torch.Tensor], how: str) -> None:
    model = fake()
    model.mix = mix
    assert f"mixes tokens outside of attention ({how})" in refused(model)


def test_x1_positions_that_are_taken_and_not_used() -> None:
    model = fake()
    for layer in model.layers:
        layer.forward = lambda x, position_ids, layer=layer, **kwargs: FakeAttention.forward(
            layer, x, torch.zeros(1, 1), **kwargs
        )
    assert "takes no position_ids, or does not use them" in refused(model)


def test_x1_tokens_that_are_numbered_by_the_model_get_its_positions() -> None:
    """``torch.arange`` in the middle of a layer: the probe remembers the line, and there positions are given."""
    from modelbay_transformers.positions import numbered

    class Numbers(FakeModel):
        def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            own = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            return super().forward(input_ids, own, **kwargs)

    model = build_on_meta(Numbers, FakeConfig(), dispatch.ATTENTION, torch.float32)
    assert len(probe(model).attention) == 2
    given: list[torch.Tensor] = []
    model.layers[0].forward = lambda x, position_ids, **kwargs: given.append(position_ids) or x
    model.layers[1].forward = lambda x, **kwargs: x
    positions = torch.tensor([[4, 5, 0, 1]])
    with numbered(model, positions):
        model(torch.zeros(1, 4, dtype=torch.long, device="meta"))
    assert torch.equal(given[0], positions)


def test_x1_a_numbering_that_picks_tokens_is_refused() -> None:
    model = fake()
    model.mix = lambda x: x[:, torch.arange(x.shape[1])]
    assert "numbers its tokens itself" in refused(model)


def test_x1_what_depends_on_the_longest_position_of_the_batch() -> None:
    class Longest(FakeModel):
        def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            scale = 2 if position_ids.max() > 4096 else 1
            return super().forward(input_ids, position_ids * scale, **kwargs)

    model = build_on_meta(Longest, FakeConfig(), dispatch.ATTENTION, torch.float32)
    assert "depends on the longest position of the whole batch" in refused(model)


def test_a_forward_that_reads_hidden_states_is_probed_with_one_number_for_all_parameters() -> None:
    model = fake()
    model.mix = lambda x: x * 2 if x.sum().item() > 0 else x
    assert len(probe(model).attention) == 2
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_forward_that_needs_more_than_tokens() -> None:
    class Needs(FakeModel):
        def forward(self, input_ids: Any, pixel_values: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, position_ids)

    model = build_on_meta(Needs, FakeConfig(), dispatch.ATTENTION, torch.float32)
    assert "cannot be run on token ids and positions alone" in refused(model)


def test_buffers_that_a_forward_replaces_are_put_back() -> None:
    model = fake()
    model.register_buffer("table", torch.arange(4.0), persistent=False)

    def replacing(x: torch.Tensor) -> torch.Tensor:
        model.table = model.table.to(x.device)
        return x

    model.mix = replacing
    probe(model)
    assert model.table.device.type == "cpu"


def test_state_space_and_encoder_decoder_models_are_refused_without_weights(tmp_path: Path) -> None:
    """There is nothing but a config in the folder."""
    from modelbay.resolve import resolve
    from modelbay_runtime.build import build_model
    from modelbay_testing.tiny_configs import tiny_config

    said = {}
    for model_type in ("mamba", "t5", "qwen3_next"):
        folder = tmp_path / model_type
        tiny_config(model_type, architectures=["X"]).save_pretrained(folder)
        overrides = {"architectures": ["Qwen3NextForCausalLM" if model_type == "qwen3_next" else "MambaForCausalLM"]}
        with pytest.raises(Exception) as error:
            build_model(resolve(str(folder), model_impl="transformers", hf_overrides=overrides))
        said[model_type] = str(error.value)
    assert "mixes tokens outside of attention (a convolution)" in said["mamba"]
    assert "encoder-decoder models are not served" in said["t5"]
    assert "linear_attn" in said["qwen3_next"]
