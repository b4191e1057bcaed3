from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .attention_lumen import LumenAttention, LumenNorm
from .configuration_lumen import LumenConfig
from .rotary import LumenRotary


class LumenMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))


class LumenLayer(nn.Module):
    """Attention and MLP side by side, on one norm."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm = LumenNorm(config.hidden_size, config.norm_eps)
        self.self_attn = LumenAttention(config, layer_idx)
        self.mlp = LumenMLP(config)

    def forward(self, hidden_states, **kwargs):
        normed = self.norm(hidden_states)
        return hidden_states + self.self_attn(normed, **kwargs) + self.mlp(normed)


class LumenPreTrainedModel(PreTrainedModel):
    config_class = LumenConfig
    base_model_prefix = "model"
    _supports_attention_backend = True
    _no_split_modules = ["LumenLayer"]


class LumenModel(LumenPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LumenLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LumenNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = LumenRotary(config)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            start = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = inputs_embeds.new_ones(1, inputs_embeds.shape[1]).long().cumsum(1) - 1 + start
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=past_key_values,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class LumenForCausalLM(LumenPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = LumenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None, **kwargs):
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state) * self.config.logit_scale
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)
