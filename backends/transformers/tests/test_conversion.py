"""W4, X7: checkpoints in the layouts that exist on the hub, through Transformers' own conversion mappings.

The reference is the instance that was saved: every parameter must arrive with exactly its values, and the logits must
be those of Transformers. What is saved by Transformers has the names and shapes of the original authors.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    GroupWeightRename,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)

from modelbay import LLM
from modelbay.args import EngineArgs
from modelbay.errors import BackendError, WeightsError
from modelbay.plugins import load_plugins
from modelbay.source import ModelFiles
from modelbay.trace import Trace
from modelbay.weights.formats import TensorEntry
from modelbay.weights.matching import Expected, Known
from modelbay.weights.names import make_pieces
from modelbay_runtime.loading import load_weights
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.tiny import tiny_checkpoint
from modelbay_testing.tiny_configs import tiny_config
from modelbay_transformers.conversion import (
    IGNORED,
    NOT_BUILT,
    NOT_OF_BASE,
    compile_mapping,
    leave_out_pooler,
    read_conversion,
)
from modelbay_transformers.meta import build_on_meta

torch.set_num_threads(1)
MODEL = "model.safetensors"


def saved(model, root):
    """The checkpoint as Transformers writes it: the weights file alone."""
    root.mkdir()
    model.save_pretrained(root, max_shard_size="1GB")
    for file in root.iterdir():
        if file.name != MODEL:
            file.unlink()
    return root


def save_state(state, root):
    root.mkdir()
    save_file({name: value.contiguous().clone() for name, value in state.items()}, root / MODEL)
    return root


def names_in(root):
    with safe_open(root / MODEL, "pt") as file:
        return set(file.keys())


def load(module, root, config, **args):
    facts = SimpleNamespace(
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)), num_layers=None, sources={},
        get=lambda key, default=None: default,
    )  # fmt: skip
    what = SimpleNamespace(
        args=EngineArgs.create(str(root), **args), plugins=load_plugins([]), config=facts, arch=None, trace=Trace(),
        files=ModelFiles(str(root), "local", root, tuple(sorted(path.name for path in root.iterdir()))),
    )  # fmt: skip
    return load_weights(module, what, device="cpu")


def random_model(cls, config):
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def served(cls, config, root, *, base_only=False):
    """The module as it is after loading, and the report."""
    module = build_on_meta(cls, config, "eager", torch.float32)
    if base_only:
        leave_out_pooler(module)
    read_conversion(module, base_only=base_only).attach(module)
    return module, load(module, root, config)


def differing(module, state):
    found = module.state_dict()
    return [name for name in found if name not in state or not torch.equal(found[name], state[name])]


def converted_types():
    """The model types whose language model has a conversion of its own, with the name of the class."""
    found = {}
    for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        for model_type, name in table.items():
            if any(get_checkpoint_conversion_mapping(key) for key in (model_type, name)):
                found[model_type, name] = None
    return list(found)


#: What keeps them from being built tiny; none for a reason that has to do with weights.
NOT_TINY = {"dots3_note", "emu3", "fuyu", "inkling2_text", "inkling2_loop_text", "lfm2_moe", "mllama", "qwen4_exp_text"}


@pytest.mark.parametrize(("model_type", "name"), [item for item in converted_types() if item[0] not in NOT_TINY])
def test_w4_every_conversion_mapping_of_a_language_model(tmp_path, model_type, name):
    """As the original authors named things, and as the module does: the same values in every parameter and buffer."""
    config, cls = tiny_config(model_type), getattr(transformers, name)
    model = random_model(cls, config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    module, _ = served(cls, config, saved(model, tmp_path / "original"))
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
    assert any(name.endswith(original) for name in names_in(root)), sorted(names_in(root))
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
        module, report = served(base_cls, config, saved(model, tmp_path / "head"), base_only=True)
        assert differing(module, getattr(model, model.base_model_prefix).state_dict()) == []
        assert set(report.ignored_by_rule()) == {NOT_OF_BASE}

    def test_w4_a_pooler_on_disk_is_not_used_for_hidden_states(self, tmp_path):
        config = tiny_config("bert")
        model = random_model(transformers.BertForSequenceClassification, config)
        root = saved(model, tmp_path / "head")
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
        root = saved(model, tmp_path / "m")
        assert "embed_out.weight" in names_in(root)
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


class Config(PretrainedConfig):
    model_type = "tiny_moe_for_tests"

    def __init__(self, experts=4, intermediate=3, hidden_size=5, **kwargs):
        self.num_experts, self.intermediate_size, self.hidden_size = experts, intermediate, hidden_size
        super().__init__(**kwargs)


class Expert(nn.Module):
    def __init__(self, config, names):
        super().__init__()
        self.names = names
        for name, sizes in zip(
            names,
            ((config.hidden_size, config.intermediate_size),) * 2 + ((config.intermediate_size, config.hidden_size),),
            strict=True,
        ):
            setattr(self, name, nn.Linear(*sizes, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(torch.nn.functional.silu(gate(x)) * up(x))


class Listed(nn.ModuleList):
    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config):
        super().__init__(Expert(config, self.names) for _ in range(config.num_experts))

    def forward(self, x):
        return torch.stack([expert(x) for expert in self])


class ListedByNumber(Listed):
    names = ("w1", "w3", "w2")


class Packed(nn.Module):
    """[E, 2I, H] and [E, H, I]."""

    def __init__(self, config):
        super().__init__()
        shape = (config.num_experts, config.intermediate_size, config.hidden_size)
        self.gate_up_proj = nn.Parameter(torch.empty(shape[0], 2 * shape[1], shape[2]))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))

    def forward(self, x):
        gate, up = torch.einsum("th,eih->eti", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, self.down_proj)


class Swapped(nn.Module):
    """[E, H, 2I] and [E, I, H]."""

    def __init__(self, config):
        super().__init__()
        shape = (config.num_experts, config.hidden_size, config.intermediate_size)
        self.w13_weight = nn.Parameter(torch.empty(shape[0], shape[1], 2 * shape[2]))
        self.w2_weight = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))

    def forward(self, x):
        gate, up = (x @ self.w13_weight).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ self.w2_weight


class ThreePacked(nn.Module):
    """[E, I, H] twice, and [E, H, I]."""

    def __init__(self, config):
        super().__init__()
        shape = (config.num_experts, config.intermediate_size, config.hidden_size)
        self.w1, self.w3 = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))

    def forward(self, x):
        gate, up = (torch.einsum("th,eih->eti", x, weight) for weight in (self.w1, self.w3))
        return torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, self.w2)


class Moe(PreTrainedModel):
    config_class = Config
    base_model_prefix = "model"
    experts_class: type = Packed

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.mlp = nn.Module()
            layer.mlp.experts = self.experts_class(config)
        self.post_init()

    def _init_weights(self, module):
        pass


LAYOUTS = {cls.__name__: cls for cls in (Listed, ListedByNumber, Packed, Swapped, ThreePacked)}


def on_disk(config):
    """The same random experts, one by one, numbered, and packed in two ways."""
    torch.manual_seed(3)
    count, inner, hidden = config.num_experts, config.intermediate_size, config.hidden_size
    gate, up, down = (torch.randn(count, *s) for s in ((inner, hidden), (inner, hidden), (hidden, inner)))
    return {
        "one by one": {
            f"{i}.{name}.weight": value[i]
            for i in range(count)
            for name, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
        },
        "numbered": {
            f"{i}.{name}.weight": value[i]
            for i in range(count)
            for name, value in (("w1", gate), ("w3", up), ("w2", down))
        },
        "packed": {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down},
        "three packed": {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down},
    }


class TestBothLayouts:
    def load(self, root, config, layout, tensors, prefix="model."):
        cls = type("Moe", (Moe,), {"experts_class": LAYOUTS[layout]})
        disk = {
            f"{prefix}layers.{layer}.mlp.experts.{name}": value for layer in range(2) for name, value in tensors.items()
        }
        return served(cls, config, save_state(disk, root))[0]

    @pytest.mark.parametrize("prefix", ["", "model."])
    @pytest.mark.parametrize("disk", ["one by one", "numbered", "packed", "three packed"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_x7_disk_and_module(self, tmp_path, layout, disk, prefix):
        """A custom model: nothing of Transformers is registered for it, its structure says it all."""
        if layout == "Swapped" and "packed" in disk:
            pytest.skip("which of its dimensions is which cannot be seen on disk")
        config = Config()
        module = self.load(tmp_path / "m", config, layout, on_disk(config)[disk], prefix)
        gate_up, down = on_disk(config)["packed"].values()
        x = torch.randn(7, config.hidden_size)
        gate, up = torch.einsum("th,eih->eti", x, gate_up).chunk(2, -1)
        expected = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, down)
        with torch.no_grad():
            for layer in module.layers:
                torch.testing.assert_close(layer.mlp.experts(x), expected, rtol=1e-5, atol=1e-5)

    def test_x7_more_than_nine_experts_are_in_order(self, tmp_path):
        config = Config(experts=12)
        module = self.load(tmp_path / "m", config, "Packed", on_disk(config)["one by one"])
        assert torch.equal(module.layers[1].mlp.experts.down_proj, on_disk(config)["packed"]["down_proj"])

    def test_x7_a_missing_expert_is_an_error(self, tmp_path):
        tensors = on_disk(Config())["one by one"]
        tensors = {name: value for name, value in tensors.items() if not name.startswith("2.up")}
        with pytest.raises(WeightsError, match=r"numbers 0, 1, 3"):
            self.load(tmp_path / "packed", Config(), "Packed", tensors)
        with pytest.raises(
            WeightsError, match=r"no tensor for 2 of its parameters: layers\.0\.mlp\.experts\.2\.up_proj"
        ):
            self.load(tmp_path / "listed", Config(), "Listed", tensors)

    def test_x7_gate_and_up_that_alternate_are_not_guessed_at(self, tmp_path):
        cls = type("Alternating", (Packed,), {"is_concatenated": False})
        moe = type("Moe", (Moe,), {"experts_class": cls})
        disk = {f"layers.0.mlp.experts.{name}": value for name, value in on_disk(Config())["one by one"].items()}
        with pytest.raises(WeightsError, match="tensors that the model does not have"):
            served(moe, Config(), save_state(disk, tmp_path / "m"))

    @pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
    def test_x7_transformers_models_from_another_family_s_names(self, tmp_path, model_type):
        """Experts of Mixtral by the names of Qwen's, and the other way round."""
        config = tiny_config(model_type)
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        model = random_model(getattr(transformers, name), config)
        disk = load_file(saved(model, tmp_path / "own") / MODEL)
        to = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        to |= {new: old for old, new in to.items()}
        renamed = {}
        for key, value in disk.items():
            parts = [to.get(part, part) if ".experts." in key else part for part in key.split(".")]
            renamed[".".join(parts).replace("block_sparse_moe", "mlp")] = value
        module, _ = served(getattr(transformers, name), config, save_state(renamed, tmp_path / "other"))
        assert differing(module, model.state_dict()) == []

    def test_w4_renames_that_a_custom_class_brings(self, tmp_path):
        cls = type("Moe", (Moe,), {"_checkpoint_conversion_mapping": {r"^backbone\.": "", r"\.layers\.": ".never."}})
        tensors = on_disk(Config())["packed"]
        disk = {f"backbone.layers.{i}.mlp.experts.{name}": value for i in range(2) for name, value in tensors.items()}
        module, _ = served(cls, Config(), save_state(disk, tmp_path / "m"))
        assert torch.equal(module.layers[0].mlp.experts.down_proj, tensors["down_proj"])


def put_together(mapping, config, tensors, shapes=None):
    entries = {name: TensorEntry(name, tuple(value.shape), "float32", "f", 0) for name, value in tensors.items()}
    known = Known(Expected(tuple(shapes or ()), shapes=shapes or {}))
    results = {}
    for piece in make_pieces(entries, compile_mapping(mapping, config), SimpleNamespace(), known):
        whole = results.setdefault(piece.name, torch.full(piece.full_shape, float("nan")))
        piece.place_in(whole).copy_(piece.apply(tensors[piece.source]))
    return results


def by_transformers(entry, config, tensors):
    """What a converter itself makes of the tensors of one group, by their full names."""
    for name, value in tensors.items():
        renamed, pattern = entry.rename_source_key(name)
        entry.add_tensor(renamed, name, pattern, lambda value=value: value.clone())
    model = SimpleNamespace(get_parameter=lambda name: torch.empty(6, 4))
    return {
        name: value[0] if isinstance(value, list) else value
        for name, value in entry.convert(renamed, model=model, config=config).items()
    }


class TestOperations:
    CONFIG = SimpleNamespace(num_attention_heads=2, get_text_config=lambda: SimpleNamespace(num_hidden_layers=3))

    @pytest.mark.parametrize(
        ("make", "tensors"),
        [
            (lambda: WeightConverter("qkv", ["q", "k", "v"], [Chunk(0)]), {"l.qkv": (12, 5)}),
            (lambda: WeightConverter("qkv", ["q", "k"], [Chunk(-1)]), {"l.qkv.weight": (3, 8)}),
            (lambda: WeightConverter("qkv", ["q", "k", "v"], [Chunk(0), PermuteForRope(permute_layer_names=["q", "k"])]),
             {"l.qkv": (24, 5)}),
            (lambda: WeightConverter("qkv", ["q", "k"], [Chunk(0), PermuteForRope()]), {"l.qkv": (16,)}),
            (lambda: WeightConverter("wq", "q", [PermuteForRope(inverse=True)]), {"wq.weight": (12, 5)}),
            (lambda: WeightConverter("w13", "gate_up", [Interleave(1)]), {"w13": (2, 6, 3)}),
            (lambda: WeightConverter("w13", ["gate", "up"], [Interleave(0), Chunk(0)]), {"m.w13.weight": (6, 3)}),
            (lambda: WeightConverter("w13", "gate_up", [Interleave(0, inverse=True)]), {"w13": (6, 3)}),
            (lambda: WeightConverter("e", "f", [Transpose(1, 2)]), {"e": (2, 6, 3)}),
            (lambda: WeightConverter("e", "f", [Transpose(0, 1, check_dims=True)]), {"e": (4, 6)}),
            (lambda: WeightConverter("e", "f", [Transpose(0, 1, check_dims=True)]), {"e": (6, 4)}),
            (lambda: WeightConverter(["q", "k", "v"], "qkv", [Concatenate(0)]), {"v": (1, 2), "k": (2, 2), "q": (3, 2)}),
            (lambda: WeightConverter("shard_*.weight", "weight", [Concatenate(0)]), {f"shard_{i}.weight": (i + 1, 2) for i in range(11)}),
            (lambda: WeightConverter(["e.*.a", "e.*.b"], "e.ab", [MergeModulelist(0), Concatenate(1)]),
             {f"e.{i}.{part}": (2, 3) for part in "ab" for i in range(11)}),
            (lambda: WeightConverter("e.*.a.weight", "e.a", [MergeModulelist(1)]), {f"x.e.{i}.a.weight": (2, 3) for i in range(3)}),
        ],
    )  # fmt: skip
    def test_w4_as_transformers_does_it(self, make, tensors):
        tensors = {name: torch.randn(shape) for name, shape in tensors.items()}
        found = put_together([make()], self.CONFIG, tensors, {"f": (6, 4)})
        expected = by_transformers(make(), self.CONFIG, tensors)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    @pytest.mark.parametrize(
        ("make", "names"),
        [
            (lambda: PrefixChange(prefix_to_remove="new"), ["new.layers.0.w", "layers.0.new.w"]),
            (lambda: PrefixChange(prefix_to_add="language_model", model_prefix="model"),
             ["model.layers.0", "model.language_model.layers.0", "lm_head"]),
            (lambda: WeightRenaming("fc1", "up"), ["fc1.weight", "fc11.weight", "m.fc1", "fc1.fc1.w"]),
            (lambda: WeightRenaming(r"layers\.(\d+)\.fc", r"h.\1.mlp"), ["layers.10.fc.w", "layers.x.fc"]),
            (lambda: WeightRenaming(r"^model(?!\.vision)", "model.text"), ["model.norm", "model.vision.norm"]),
            (lambda: WeightRenaming([r"^a\.b\.b", r"^b\.a"], "a.b"), ["a.b.b.w", "b.a.w", "x.b.a"]),
            (lambda: WeightRenaming("layer.*.inv_freq", "inv_freq"), ["enc.layer.3.rot.inv_freq", "inv_freq"]),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("scope", [None, "", "text"])
    def test_w4_names_as_transformers_renames_them(self, make, names, scope):
        entry = make()
        entry.scope_prefix, entry.base_model_prefix = scope, None if scope is None else "model"
        names = [prefix + name for name in names for prefix in ("", "model.", "text.", "model.text.", "other.")]
        found = put_together(
            [entry],
            self.CONFIG,
            {name: torch.full((1,), float(i)) for i, name in enumerate(names)} if scope is None else {},
        )
        for i, name in enumerate(names):
            renamed = list(put_together([entry], self.CONFIG, {name: torch.zeros(1)}))
            assert renamed == [entry.rename_source_key(name)[0]], (i, name)
        assert scope is not None or found

    def test_w4_a_converter_within_a_submodel(self):
        entry = WeightConverter("^qkv", ["q", "k"], [Chunk(0)])
        entry.scope_prefix, entry.base_model_prefix = "text", "model"
        names = ("model.text.qkv", "text.qkv", "qkv", "model.vision.qkv")
        found = put_together([entry], self.CONFIG, {name: torch.arange(4.0) for name in names})
        assert set(found) == {"model.text.q", "model.text.k", "text.q", "text.k", "qkv", "model.vision.qkv"}

    def test_w4_two_layers_of_the_disk_are_one(self):
        from transformers.core_model_loading import LayerPairCollapse

        names = [
            f"layers.{i}.{part}" for i in range(6) for part in ("mixer.q.weight", "attn_alpha", "mlp_alpha", "norm")
        ]
        for name in names:
            (renamed,) = put_together([LayerPairCollapse()], self.CONFIG, {name: torch.zeros(1)})
            assert renamed == LayerPairCollapse().rename_source_key(name)[0]

    def test_w4_an_operation_that_is_not_known_is_an_error_that_names_it(self):
        class Fancy(Chunk):
            pass

        for entry, name in (
            (WeightConverter("a", "b", [Fancy()]), "Fancy"),
            (WeightConverter(["a", "b"], "c", [MergeModulelist()]), "MergeModulelist"),
            (WeightConverter("e.*.a", "b", [Transpose()]), "Transpose"),
            (GroupWeightRename(["a0", "a1"], ["a1", "a2"]), "GroupWeightRename"),
        ):
            with pytest.raises(BackendError, match=f"converts checkpoints of this model by .*{name}"):
                compile_mapping([entry], self.CONFIG)
