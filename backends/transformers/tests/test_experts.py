"""X7: experts one by one or packed, on disk and in the module: every combination gives the same output."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from modelbay.errors import WeightsError
from modelbay_testing.states import MODEL_FILE, differing, load_module, random_model, save_model, save_state
from modelbay_testing.tiny_configs import tiny_config
from modelbay_transformers.conversion import read_conversion
from modelbay_transformers.meta import build_on_meta


def served(cls, config, root):
    """The module as it is after loading."""
    module = build_on_meta(cls, config, "eager", torch.float32)
    read_conversion(module, base_only=False).attach(module)
    load_module(module, root, tie=getattr(config, "tie_word_embeddings", False))
    return module


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


DISK = ("one by one", "numbered", "packed", "three packed")
LAYOUTS = {cls.__name__: cls for cls in (Listed, ListedByNumber, Packed, Swapped, ThreePacked)}
#: A packed tensor on disk is never taken to be swapped: nothing on disk tells which of its dimensions is which.
COMBINATIONS = [(layout, disk) for layout in LAYOUTS for disk in DISK if layout != "Swapped" or "packed" not in disk]


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
        return served(cls, config, save_state(disk, root))

    @pytest.mark.parametrize("prefix", ["", "model."])
    @pytest.mark.parametrize(("layout", "disk"), COMBINATIONS)
    def test_x7_disk_and_module(self, tmp_path, layout, disk, prefix):
        """A custom model: nothing of Transformers is registered for it, its structure says it all."""
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
        disk = load_file(save_model(model, tmp_path / "own") / MODEL_FILE)
        to = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        to |= {new: old for old, new in to.items()}
        renamed = {}
        for key, value in disk.items():
            parts = [to.get(part, part) if ".experts." in key else part for part in key.split(".")]
            renamed[".".join(parts).replace("block_sparse_moe", "mlp")] = value
        module = served(getattr(transformers, name), config, save_state(renamed, tmp_path / "other"))
        assert differing(module, model.state_dict()) == []

    def test_w4_renames_that_a_custom_class_brings(self, tmp_path):
        cls = type("Moe", (Moe,), {"_checkpoint_conversion_mapping": {r"^backbone\.": "", r"\.layers\.": ".never."}})
        tensors = on_disk(Config())["packed"]
        disk = {f"backbone.layers.{i}.mlp.experts.{name}": value for i in range(2) for name, value in tensors.items()}
        module = served(cls, Config(), save_state(disk, tmp_path / "m"))
        assert torch.equal(module.layers[0].mlp.experts.down_proj, tensors["down_proj"])
