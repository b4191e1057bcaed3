"""Dispatches attention through the interface and does nothing else for it: no flag, no kwargs handed down."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_hive import HiveConfig


def eager_attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def turn(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class HiveAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim)

    def forward(self, hidden_states, cos, sin, mask):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = turn(self.q_proj(hidden_states).view(shape).transpose(1, 2), cos, sin)
        key = turn(self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2), cos, sin)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        # The scaling is head_dim**-0.5, so there is none to pass.
        found, _ = attention_interface(self, query, key, value, mask)
        return self.o_proj(found.reshape(*hidden_states.shape[:-1], -1))


class HiveExpert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class HiveExperts(nn.ModuleList):
    def __init__(self, config):
        super().__init__([HiveExpert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            token, slot = torch.where(top_k_index == index)
            result.index_add_(0, token, expert(hidden_states[token]) * top_k_weights[token, slot, None])
        return result


class HiveSparseMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = HiveExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        top_k_weights, top_k_index = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return self.experts(flat, top_k_index, top_k_weights).view_as(hidden_states)


class HiveLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.self_attn = HiveAttention(config, layer_idx)
        self.post_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = HiveSparseMoeBlock(config)

    def forward(self, hidden_states, cos, sin, mask):
        hidden_states = hidden_states + self.self_attn(self.input_norm(hidden_states), cos, sin, mask)
        return hidden_states + self.mlp(self.post_norm(hidden_states))


class HiveModel(PreTrainedModel):
    config_class = HiveConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([HiveLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        size = config.hidden_size // config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            cache=None,
            position_ids=position_ids,
        )
        angles = position_ids[:, None, :, None].float() * self.frequencies
        cos, sin = angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos, sin, mask)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))
