import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_grove import GroveConfig


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def turn(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class GroveAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.sizes = [config.hidden_size] + [config.num_key_value_heads * self.head_dim] * 2
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            part.reshape(shape).transpose(1, 2) for part in self.qkv(hidden_states).split(self.sizes, dim=-1)
        )
        query, key = turn(query, *position_embeddings), turn(key, *position_embeddings)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        found, _ = attention_interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(found.reshape(*hidden_states.shape[:-1], -1))


class GroveExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_local_experts
        size = config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, size))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for index in range(self.num_experts):
            token, slot = torch.where(top_k_index == index)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[index]).chunk(2, dim=-1)
            found = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[index])
            result.index_add_(0, token, found * top_k_weights[token, slot, None])
        return result


class GroveSparseMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=True)
        self.experts = GroveExperts(config)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        best, top_k_index = self.router(flat).topk(self.top_k, dim=-1)
        return self.experts(flat, top_k_index, best.softmax(-1)).view_as(hidden_states)


class GroveLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = GroveAttention(config, layer_idx)
        self.moe = GroveSparseMoeBlock(config)
        self.before_attention = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.before_moe = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        normed = self.before_attention(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, position_embeddings, attention_mask, **kwargs)
        return hidden_states + self.moe(self.before_moe(hidden_states))


class GrovePreTrainedModel(PreTrainedModel):
    config_class = GroveConfig
    base_model_prefix = "model"


class GroveModel(GrovePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([GroveLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        size = config.hidden_size // config.num_attention_heads
        frequencies = config.theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size) / config.stretch
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
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
        position_embeddings = angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, mask, **kwargs)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class GroveForCausalLM(GrovePreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = GroveModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        hidden_states = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        return MoeCausalLMOutputWithPast(logits=self.lm_head(hidden_states))
