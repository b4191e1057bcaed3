"""W4: checkpoints in the layouts that exist on the hub, through Transformers' own conversion mappings.

The reference is the instance that was saved: every parameter must arrive with exactly its values, and the logits must
be those of Transformers. What is saved by Transformers has the names and shapes of the original authors.
"""

import pytest
import torch
import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)

from modelbay import LLM
from modelbay.errors import WeightsError
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.states import differing, load_module, random_model, save_model, save_state, saved_names
from modelbay_testing.tiny import tiny_checkpoint
from modelbay_testing.tiny_configs import tiny_config
from modelbay_transformers.conversion import IGNORED, NOT_BUILT, NOT_OF_BASE, leave_out_pooler, read_conversion
from modelbay_transformers.meta import build_on_meta


def served(cls, config, root, *, base_only=False):
    """The module as it is after loading, and the report."""
    module = build_on_meta(cls, config, "eager", torch.float32)
    if base_only:
        leave_out_pooler(module)
    read_conversion(module, base_only=base_only).attach(module)
    return module, load_module(module, root, tie=getattr(config, "tie_word_embeddings", False))


def converted_types():
    """The model types whose language model has a conversion of its own, with the name of the class."""
    found = {}
    for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        for model_type, name in table.items():
            if any(get_checkpoint_conversion_mapping(key) for key in (model_type, name)):
                found[model_type, name] = None
    return list(found)


#: What keeps them from being built tiny; none for a reason that has to do with weights.
NOT_TINY = {"dots3_note", "emu3", "inkling2_text", "inkling2_loop_text", "qwen4_exp_text"}


@pytest.mark.parametrize(("model_type", "name"), [item for item in converted_types() if item[0] not in NOT_TINY])
def test_w4_every_conversion_mapping_of_a_language_model(tmp_path, model_type, name):
    """As the original authors named things, and as the module does: the same values in every parameter and buffer."""
    config, cls = tiny_config(model_type), getattr(transformers, name)
    model = random_model(cls, config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    module, _ = served(cls, config, save_model(model, tmp_path / "original"))
    assert differing(module, state) == []
    module, _ = served(cls, config, save_state(state, tmp_path / "module"))
    assert differing(module, state) == []


def test_w4_conversions_are_many():
    """So that the test above cannot shrink to nothing."""
    assert len(converted_types()) >= 60


@pytest.mark.parametrize(
    ("model_type", "original", "overrides"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w1.weight", {"num_local_experts": 4}),
        ("phimoe", "block_sparse_moe.experts.3.w3.weight", {"num_local_experts": 4}),
        ("gpt_neox", "embed_out.weight", {}),
        ("granitemoe", "block_sparse_moe.input_linear.weight", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", "mlp.experts.0.up_proj.weight",
         {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}),
        ("deepseek_v3", "mlp.experts.1.down_proj.weight",
         {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
          "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}),
        ("gpt_oss", "mlp.experts.gate_up_proj",
         {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2, "sliding_window": 16}),
    ],
)  # fmt: skip
def test_x7_logits_from_the_original_layout(tmp_path, model_type, original, overrides):
    root = tiny_checkpoint(tmp_path / "model", model_type, **overrides)
    assert any(name.endswith(original) for name in saved_names(root)), sorted(saved_names(root))
    prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30 + i for i in range(20)]]
    with LLM(str(root), model_impl="transformers", dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 24) as llm:
        results = engine_logits(llm, prompts, 3)
        assert not llm.load_report.unaccounted()
    expected = transformers_logits(root, [tokens for tokens, _ in results])
    assert worst_difference([logits for _, logits in results], expected) < 1e-4


class TestPrefixes:
    @pytest.mark.parametrize(
        ("model_type", "name"),
        [("gpt2", "GPT2LMHeadModel"), ("gpt_neox", "GPTNeoXForCausalLM"), ("bloom", "BloomForCausalLM")],
    )
    @pytest.mark.parametrize("extra", ["", "model."])
    def test_w4_a_base_checkpoint_in_a_class_with_a_head(self, tmp_path, model_type, name, extra):
        """GPT-2 on the hub is saved without ``transformer.``; the head is tied."""
        config, cls = tiny_config(model_type, tie_word_embeddings=True), getattr(transformers, name)
        model = random_model(cls, config)
        base = getattr(model, model.base_model_prefix)
        root = save_state({extra + name: value for name, value in base.state_dict().items()}, tmp_path / "base")
        module, _ = served(cls, config, root)
        assert differing(module, model.state_dict()) == []
        assert module.get_output_embeddings().weight is module.get_input_embeddings().weight

    @pytest.mark.parametrize(
        ("model_type", "name"),
        [("bert", "BertForMaskedLM"), ("roberta", "RobertaForMaskedLM"), ("modernbert", "ModernBertForMaskedLM"),
         ("albert", "AlbertForMaskedLM"), ("xlm-roberta", "XLMRobertaForMaskedLM"), ("qwen2", "Qwen2ForCausalLM"),
         ("gte", "GteForMaskedLM"), ("mixtral", "MixtralForCausalLM")],
    )  # fmt: skip
    def test_w4_a_checkpoint_with_a_head_for_hidden_states(self, tmp_path, model_type, name):
        config, cls = tiny_config(model_type, tie_word_embeddings=False), getattr(transformers, name)
        model = random_model(cls, config)
        base_cls = MODEL_MAPPING[type(config)]
        module, report = served(base_cls, config, save_model(model, tmp_path / "head"), base_only=True)
        assert differing(module, getattr(model, model.base_model_prefix).state_dict()) == []
        assert set(report.ignored_by_rule()) == {NOT_OF_BASE}

    def test_w4_a_pooler_on_disk_is_not_used_for_hidden_states(self, tmp_path):
        config = tiny_config("bert")
        model = random_model(transformers.BertForSequenceClassification, config)
        root = save_model(model, tmp_path / "head")
        module, report = served(transformers.BertModel, config, root, base_only=True)
        assert report.ignored_by_rule() == {NOT_OF_BASE: 2, NOT_BUILT: 2}
        assert module.pooler is None
        ids = torch.arange(3, 9)[None]
        with torch.no_grad():
            assert torch.equal(module(ids).last_hidden_state, model.bert(ids).last_hidden_state)

    def test_w4_an_unknown_name_under_the_base_is_an_error(self, tmp_path):
        config = tiny_config("bert")
        model = random_model(transformers.BertForMaskedLM, config)
        for name in ("bert.encoder.layer.0.adapter.weight", "bert.strange.weight", "encoder.strange"):
            root = save_state({**model.state_dict(), name: torch.zeros(1)}, tmp_path / name)
            with pytest.raises(WeightsError, match=f"1 tensors that the model does not have: {name}"):
                served(transformers.BertModel, config, root, base_only=True)

    def test_w4_a_head_is_not_ignored_where_it_is_used(self, tmp_path):
        config = tiny_config("qwen2", tie_word_embeddings=False)
        model = random_model(transformers.Qwen2ForCausalLM, config)
        root = save_state({**model.state_dict(), "score.weight": torch.zeros(1)}, tmp_path / "m")
        with pytest.raises(WeightsError, match=r"does not have: score\.weight"):
            served(transformers.Qwen2ForCausalLM, config, root)


class TestTies:
    @pytest.mark.parametrize("kept", ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"])
    def test_w5_beyond_lm_head(self, tmp_path, kept):
        """BERT ties its decoder's weight and bias; either name may be the one on disk."""
        config, cls = tiny_config("bert", tie_word_embeddings=True), transformers.BertLMHeadModel
        model = random_model(cls, config)
        state = model.state_dict()
        both = {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}
        disk = {name: value for name, value in state.items() if name not in both - {kept}}
        del disk["cls.predictions.decoder.bias"]
        module, _ = served(cls, config, save_state(disk, tmp_path / "m"))
        assert differing(module, state) == []
        assert module.cls.predictions.decoder.bias is module.cls.predictions.bias

    def test_w5_embed_out_of_gpt_neox(self, tmp_path):
        config, cls = tiny_config("gpt_neox", tie_word_embeddings=False), transformers.GPTNeoXForCausalLM
        model = random_model(cls, config)
        root = save_model(model, tmp_path / "m")
        assert "embed_out.weight" in saved_names(root)
        module, _ = served(cls, config, root)
        assert torch.equal(module.lm_head.weight, model.lm_head.weight)


class TestOldNames:
    def test_w4_gamma_and_beta(self, tmp_path):
        config, cls = tiny_config("bert"), transformers.BertForMaskedLM
        model = random_model(cls, config)
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in model.state_dict().items()
        }
        assert any(name.endswith("gamma") for name in old)
        module, _ = served(cls, config, save_state(old, tmp_path / "m"))
        assert differing(module, model.state_dict()) == []

    @pytest.mark.parametrize(
        ("model_type", "name", "extra"),
        [
            ("gpt_neox", "GPTNeoXForCausalLM",
             {"gpt_neox.layers.0.attention.bias": (1, 1, 8, 8), "gpt_neox.layers.0.attention.masked_bias": (),
              "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (4,)}),
            ("gpt2", "GPT2LMHeadModel", {"h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}),
            ("bert", "BertForMaskedLM", {"bert.embeddings.position_ids": (1, 512)}),
        ],
    )  # fmt: skip
    def test_w4_what_older_versions_saved_beside_the_weights(self, tmp_path, model_type, name, extra):
        config, cls = tiny_config(model_type), getattr(transformers, name)
        model = random_model(cls, config)
        root = save_state(
            model.state_dict() | {name: torch.zeros(shape) for name, shape in extra.items()}, tmp_path / "m"
        )
        module, report = served(cls, config, root)
        assert differing(module, model.state_dict()) == []
        assert {name for name, use in report.tensors.items() if use.status == "ignored"} == set(extra)
        assert all(use.rule for use in report.tensors.values() if use.status == "ignored")

    def test_w4_transformers_own_list_of_what_is_ignored(self, tmp_path):
        config, cls = tiny_config("qwen3_next"), transformers.Qwen3NextForCausalLM
        model = random_model(cls, config)
        root = save_state(model.state_dict() | {"mtp.fc.weight": torch.zeros(1)}, tmp_path / "m")
        _, report = served(cls, config, root)
        assert report.ignored_by_rule() == {IGNORED: 1}
