"""W4, W7: a module that says how checkpoints of it are laid out; joined pieces on ranks; memory while joining."""

import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelbay.errors import WeightsError
from modelbay.weights.safetensors import SafetensorsSource
from modelbay.weights.transforms import Concat, Ignore, Rename, Split, Stack, Transpose, Unstack
from modelbay_runtime.layout import Section, Shard
from modelbay_testing.bare_loading import load_bare, meta_parameter, peak_of_loading

EXPERTS, ROWS, COLUMNS = 4, 3, 6
EXPERT = r"experts\.(?P<index>\d+)\."
PACK = (
    Stack(EXPERT + "gate$", "experts.#gate"),
    Stack(EXPERT + "up$", "experts.#up"),
    Concat((r"#gate$", r"#up$"), "gate_up", dim=1),
)


def load(root, model, transforms=(), **options):
    return load_bare(root, model, transforms=transforms, **options)[0]


def experts():
    return {f"experts.{i}.{part}": torch.randn(ROWS, COLUMNS) for i in range(EXPERTS) for part in ("gate", "up")}


def joined(state):
    halves = (torch.stack([value for name, value in state.items() if name.endswith(part)]) for part in ("gate", "up"))
    return torch.cat([*halves], 1).bfloat16()


def module(shape=(EXPERTS, 2 * ROWS, COLUMNS), shard=None, **attributes):
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up = meta_parameter(*shape)
    if shard is not None:
        model.experts.shards = {"gate_up": shard}
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class TestTheModuleSays:
    def test_w4_its_transforms_take_the_place_of_the_architecture_s(self, tmp_path):
        state = experts()
        save_file(state, tmp_path / "model.safetensors")
        model = module(checkpoint_transforms=PACK)
        report = load(tmp_path, model, transforms=(Ignore("up", "wrong"),))
        assert torch.equal(model.experts.gate_up, joined(state))
        assert len(report.parameters["experts.gate_up"].sources) == 2 * EXPERTS

    def test_w4_one_module_for_both_layouts_on_disk(self, tmp_path):
        state = experts()
        save_file({"experts.gate_up": joined(state)}, tmp_path / "model.safetensors")
        model = module(checkpoint_transforms=PACK)
        load(tmp_path, model)
        assert torch.equal(model.experts.gate_up, joined(state))

    def test_w4_cut_as_its_parameters_are_packed_or_not(self, tmp_path):
        qkv = torch.randn(9, COLUMNS)
        save_file({"attn.qkv.weight": qkv}, tmp_path / "model.safetensors")
        split = Split(r"\bqkv\b", ("q", "k", "v"), "model")
        model = nn.Module()
        model.attn = nn.Module()
        model.attn.packed_qk, model.attn.v = nn.Module(), nn.Module()
        model.attn.packed_qk.weight, model.attn.v.weight = meta_parameter(6, COLUMNS), meta_parameter(3, COLUMNS)
        model.attn.packed_qk.packed = (Section("q", 0, 4), Section("k", 4, 2))
        model.checkpoint_transforms = (split,)
        load(tmp_path, model)
        assert torch.equal(model.attn.packed_qk.weight, qkv[:6].bfloat16())
        assert torch.equal(model.attn.v.weight, qkv[6:].bfloat16())

    @pytest.mark.parametrize("own", ["gpt_neox.", "backbone."])
    @pytest.mark.parametrize("has_it", [True, False])
    def test_w4_its_base_prefix(self, tmp_path, own, has_it):
        """Case 31."""
        prefix = own if has_it else ""
        save_file({f"{prefix}experts.gate_up": torch.ones(EXPERTS, 2 * ROWS, COLUMNS)}, tmp_path / "model.safetensors")
        model = module(checkpoint_prefixes=(own,))
        load(tmp_path, model)
        assert model.experts.gate_up.sum() == EXPERTS * 2 * ROWS * COLUMNS

    def test_w4_a_buffer_that_a_checkpoint_may_lack(self, tmp_path):
        save_file({"experts.gate_up": torch.ones(EXPERTS, 2 * ROWS, COLUMNS)}, tmp_path / "model.safetensors")

        def model(**attributes):
            made = module(**attributes)
            made.register_buffer("router_bias", torch.zeros(EXPERTS))
            return made

        report = load(tmp_path, model(checkpoint_optional=(r"router_bias",)))
        assert report.parameters["router_bias"].status == "kept"
        with pytest.raises(WeightsError, match="no tensor for 1 of its parameters: router_bias"):
            load(tmp_path, model())

    def test_w4_a_parameter_that_a_checkpoint_may_not_lack(self, tmp_path):
        save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
        model = module(checkpoint_optional=("gate_up",), checkpoint_transforms=(Rename("other", "other"),))
        with pytest.raises(WeightsError, match=r"experts\.gate_up"):
            load(tmp_path, model)

    def test_w6_made_up_weights_need_no_transforms(self, tmp_path):
        model = module(checkpoint_transforms=PACK)
        load(tmp_path, model, load_format="dummy")
        assert model.experts.gate_up.isfinite().all()


class TestRanks:
    @pytest.mark.parametrize("swapped", [False, True])
    @pytest.mark.parametrize("dim", [0, 1, 2])
    @pytest.mark.parametrize("part", [0, 1, 2])
    def test_x7_a_rank_s_part_of_what_is_joined(self, tmp_path, dim, part, swapped):
        """Whole experts, a range that ends within one of the two halves, columns; half of it, or the middle."""
        state = experts()
        save_file(state, tmp_path / "model.safetensors")
        whole = joined(state).transpose(1, 2) if swapped else joined(state)
        size = whole.shape[dim] // 2
        start = (0, size, size // 2)[part]
        expected = whole.narrow(dim, start, size)
        turn = (Transpose("gate_up", (1, 2)),) if swapped else ()
        model = module(expected.shape, Shard(dim, start, size), checkpoint_transforms=(*PACK, *turn))
        load(tmp_path, model)
        assert torch.equal(model.experts.gate_up, expected)


class TestReading:
    def reads(self, monkeypatch):
        found = []
        read = SafetensorsSource.read

        def recording(self, name, index=None):
            found.append((name, index))
            return read(self, name, index)

        monkeypatch.setattr(SafetensorsSource, "read", recording)
        return found

    def test_w7_every_expert_is_read_once_and_whole(self, tmp_path, monkeypatch):
        save_file(experts(), tmp_path / "model.safetensors")
        reads = self.reads(monkeypatch)
        load(tmp_path, module(checkpoint_transforms=PACK))
        assert sorted(reads) == sorted((name, None) for name in experts())

    def test_w7_a_packed_tensor_is_read_expert_by_expert(self, tmp_path, monkeypatch):
        packed = torch.randn(EXPERTS, ROWS, COLUMNS)
        save_file({"experts.up": packed}, tmp_path / "model.safetensors")
        reads = self.reads(monkeypatch)
        model = nn.Module()
        model.experts = nn.ModuleList(nn.Module() for _ in range(EXPERTS))
        for expert in model.experts:
            expert.up = meta_parameter(ROWS, COLUMNS)
        model.checkpoint_transforms = (Unstack(r"experts\.up", "experts.{index}.up"),)
        load(tmp_path, model)
        assert reads == [("experts.up", (slice(i, i + 1),)) for i in range(EXPERTS)]
        assert all(torch.equal(expert.up, packed[i].bfloat16()) for i, expert in enumerate(model.experts))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's peak of this process")
@pytest.mark.parametrize("disk", ["float32", "bfloat16"])
def test_w7_peak_memory_while_experts_are_joined(tmp_path, disk):
    """Below 1.15 × the model in its own dtype plus the largest tensor on disk."""
    layers, count, side = 4, 16, 512
    build = f"""
        from modelbay.weights.transforms import Concat, Stack

        model = nn.Module()
        for i in range({layers}):
            layer = nn.Module()
            layer.gate_up = meta_parameter({count}, 4 * {side}, {side})
            model.add_module(f"layer{{i}}", layer)
        stacks = [Stack(rf"\\.(?P<index>\\d+)\\.{{part}}$", f".#{{part}}") for part in ("gate", "up")]
        model.checkpoint_transforms = (*stacks, Concat(("#gate$", "#up$"), "gate_up", 1))
    """
    state = {
        f"layer{layer}.{i}.{part}": torch.ones(2 * side, side, dtype=getattr(torch, disk))
        for layer in range(layers)
        for i in range(count)
        for part in ("gate", "up")
    }
    largest = max(value.nbytes for value in state.values())
    save_file(state, tmp_path / "model.safetensors")
    peak, model_bytes = peak_of_loading(tmp_path, build)
    assert model_bytes == layers * count * 4 * side * side * 2
    assert peak < 1.15 * model_bytes + largest
