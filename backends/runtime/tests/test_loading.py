"""W1-W8: checkpoints loaded into a module tree on meta, compared with the tensors that were saved."""

import json
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelbay.errors import WeightsError
from modelbay.hookspecs import hookimpl
from modelbay.specs import LoadFormatSpec
from modelbay.weights.transforms import Rename, Split, Stack
from modelbay_runtime.layout import Section, Shard
from modelbay_testing.bare_loading import load_bare, meta_parameter, peak_of_loading

H, Q, KV, V, LAYERS = 8, 8, 4, 11, 2
META = torch.device("meta")


class Proj(nn.Module):
    """A linear layer that records when it is finished, and then holds a repacked weight."""

    def __init__(self, out, into, bias=False):
        super().__init__()
        self.weight = meta_parameter(out, into)
        self.bias = meta_parameter(out) if bias else None
        self.packs = []

    def post_load(self):
        self.packs.append(self.weight.detach().clone())
        self.weight = None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = Proj(Q + 2 * KV, H, bias=True)
        self.qkv_proj.packed = (Section("q_proj", 0, Q), Section("k_proj", Q, KV), Section("v_proj", Q + KV, KV))
        self.o_proj = Proj(H, Q)
        self.norm = nn.Module()
        self.norm.weight = meta_parameter(H)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Head(nn.Module):
    def __init__(self, tied_to):
        super().__init__()
        self.weight = meta_parameter(V, H)
        self.tied_to = tied_to


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = meta_parameter(V, H)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.router = nn.Module()
        self.router.bias = meta_parameter(3, dtype=torch.float32)
        self.register_buffer("scale", torch.full((2,), 5.0))


class Tiny(nn.Module):
    def __init__(self, tied_to="model.embed_tokens.weight"):
        super().__init__()
        self.model = Body()
        self.lm_head = Head(tied_to)


def tensors(tied=False, dtype=torch.float32):
    torch.manual_seed(1)
    state = {
        "model.embed_tokens.weight": torch.randn(V, H),
        "model.router.bias": torch.randn(3),
        "model.scale": torch.ones(2),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q_proj", Q), ("k_proj", KV), ("v_proj", KV)):
            state[f"{at}{name}.weight"], state[f"{at}{name}.bias"] = torch.randn(rows, H), torch.randn(rows)
        state[f"{at}o_proj.weight"], state[f"{at}norm.weight"] = torch.randn(H, Q), torch.randn(H)
    if not tied:
        state["lm_head.weight"] = torch.randn(V, H)
    return {name: value.to(dtype) for name, value in state.items()}


def load(root, model=None, dtype=torch.bfloat16, **options):
    model = Tiny() if model is None else model
    return model, *load_bare(root, model, dtype, layers=LAYERS, **options)


def check_values(model, state, dtype=torch.bfloat16):
    """Every value of the module against what was saved, packed weights included."""
    for number, layer in enumerate(model.model.layers):
        at = f"model.layers.{number}."
        packed = torch.cat([state[f"{at}{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]).to(dtype)
        assert [torch.equal(value, packed) for value in layer.qkv_proj.packs] == [True]
        bias = torch.cat([state[f"{at}{name}.bias"] for name in ("q_proj", "k_proj", "v_proj")]).to(dtype)
        assert torch.equal(layer.qkv_proj.bias, bias)
        assert torch.equal(layer.o_proj.packs[0], state[f"{at}o_proj.weight"].to(dtype))
        assert torch.equal(layer.norm.weight, state[f"{at}norm.weight"].to(dtype))
        assert torch.equal(layer.table, torch.arange(4.0))
    assert torch.equal(model.model.embed_tokens.weight, state["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(model.model.router.bias, state["model.router.bias"].float())
    assert torch.equal(model.model.scale, state["model.scale"].float())


def save(root, state, name="model.safetensors"):
    save_file({key: value.clone() for key, value in state.items()}, root / name)


def untouched(model):
    """No parameter has memory, no buffer has changed."""
    return all(value.is_meta for value in model.parameters()) and model.model.scale.tolist() == [5.0, 5.0]


class TestLoading:
    @pytest.mark.parametrize("disk", [torch.float32, torch.bfloat16, torch.float16])
    def test_w7_every_value_arrives_converted_once(self, tmp_path, disk):
        state = tensors(dtype=disk)
        save(tmp_path, state)
        model, report, _ = load(tmp_path)
        check_values(model, state)
        assert torch.equal(model.lm_head.weight, state["lm_head.weight"].to(torch.bfloat16))
        assert not any(value.requires_grad for value in model.parameters())
        kind = str(disk).removeprefix("torch.")
        # W8: the router's bias and the buffer stay float32, the other tensors become bfloat16.
        to_bf16 = {f"{kind} -> bfloat16": len(state) - 2} if kind != "bfloat16" else {}
        to_f32 = {f"{kind} -> float32": 2} if kind != "float32" else {}
        assert report.casts == to_bf16 | to_f32

    def test_the_dtype_asked_for_replaces_that_of_most_parameters(self, tmp_path):
        state = tensors()
        save(tmp_path, state)
        model, report, _ = load(tmp_path, dtype=torch.float32)
        check_values(model, state, torch.float32)
        assert report.casts == {}

    def test_w7_a_module_is_finished_before_the_next_tensor_is_read(self, tmp_path):
        """Peak memory: repacking a layer overlaps with no other layer's."""
        names = list(tensors())
        save(tmp_path, tensors())
        model = Tiny()
        pending = []
        for layer in model.model.layers:
            layer.o_proj.post_load = lambda layer=layer: pending.append(
                sum(value.is_meta for value in model.model.layers.parameters())
            )
        load(tmp_path, model)
        assert pending
        assert pending[0] > 0, names

    def test_post_load_of_a_parent_comes_after_its_children(self, tmp_path):
        save(tmp_path, tensors())
        model, order = Tiny(), []
        model.post_load = lambda: order.append("model")
        model.model.layers[1].post_load = lambda: order.append("layer")
        model.model.layers[1].o_proj.post_load = lambda: order.append("o_proj")
        load(tmp_path, model)
        assert order == ["o_proj", "layer", "model"]

    def test_w1_pt_files_give_the_same(self, tmp_path):
        state = tensors()
        torch.save(state, tmp_path / "pytorch_model.bin")
        model, report, _ = load(tmp_path)
        check_values(model, state)
        assert report.format == "pt"

    def test_w2_sharded_with_an_index(self, tmp_path):
        state = tensors()
        names = sorted(state)
        half = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in half.items():
            save(tmp_path, {name: state[name] for name in part}, file)
        weight_map = {name: file for file, part in half.items() for name in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        model, report, _ = load(tmp_path)
        check_values(model, state)
        assert report.files == ("a.safetensors", "b.safetensors")
        (tmp_path / "b.safetensors").unlink()
        model = Tiny()
        with pytest.raises(WeightsError, match=r"b\.safetensors"):
            load(tmp_path, model)
        assert untouched(model)

    def test_w4_a_tensor_packed_on_disk_as_in_the_model(self, tmp_path):
        state = tensors()
        fused = dict(state)
        for layer in range(LAYERS):
            for kind in ("weight", "bias"):
                parts = [fused.pop(f"model.layers.{layer}.{name}.{kind}") for name in ("q_proj", "k_proj", "v_proj")]
                fused[f"model.layers.{layer}.qkv_proj.{kind}"] = torch.cat(parts)
        save(tmp_path, fused)
        model, report, _ = load(tmp_path)
        check_values(model, state)
        source = ("model.safetensors", "model.layers.1.qkv_proj.weight")
        assert report.parameters["model.layers.1.k_proj.weight"].sources == [source]

    def test_w4_transforms_of_the_architecture(self, tmp_path):
        state = tensors()
        disk = {name.replace("model.layers", "blocks"): value for name, value in state.items()}
        for layer in range(LAYERS):
            parts = [disk.pop(f"blocks.{layer}.{name}.weight") for name in ("q_proj", "k_proj", "v_proj")]
            disk[f"blocks.{layer}.attn.weight"] = torch.cat(parts)
        save(tmp_path, disk)
        split = Split(r"\battn\b", ("q_proj", "k_proj", "v_proj"), ("q_size", "kv_size", "kv_size"))
        model, report, _ = load(tmp_path, transforms=(Rename(r"^blocks\.", "model.layers."), split))
        check_values(model, state)
        assert report.tensors["blocks.0.attn.weight"].targets == [
            f"model.layers.0.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")
        ]

    def test_w4_stacked_experts(self, tmp_path):
        experts = {f"experts.{i}.up.weight": torch.randn(3, 4) for i in range(12)}
        save(tmp_path, experts)
        model = nn.Module()
        model.experts = nn.Module()
        model.experts.up = meta_parameter(12, 3, 4)
        stack = Stack(r"experts\.(?P<index>\d+)\.up\.weight", "experts.up")
        _, report, _ = load(tmp_path, model, transforms=(stack,))
        assert torch.equal(model.experts.up, torch.stack(list(experts.values())).bfloat16())
        assert len(report.parameters["experts.up"].sources) == 12

    def test_a_plugin_s_format_with_its_own_names(self, tmp_path):
        """W1: a format that a plugin adds is chosen by auto when it finds files, and its transforms come first."""
        state = tensors()
        torch.save({f"x.{name}": value for name, value in state.items()}, tmp_path / "model.odd")
        model, report, trace = load(tmp_path, plugins=[sys.modules[odd_plugin().__name__]])
        check_values(model, state)
        assert report.format == "odd"
        assert trace.find("load format").answer == "odd"


def odd_plugin():
    """A plugin module with the load format "odd": a pickled state dict whose names begin with "x."."""
    module = ModuleType("odd_plugin_for_tests")

    class Odd:
        def select(self, files):
            return tuple(name for name in files.names if name.endswith(".odd"))

        def open(self, files, config, args):
            from modelbay.weights.pt import PyTorchSource

            return PyTorchSource({name: files.root / name for name in self.select(files)})

    @hookimpl
    def register_load_formats():
        target = f"{module.__name__}:"
        return [
            LoadFormatSpec(
                name="odd", target=f"{target}Odd", suffixes=(".odd",), auto=5, transforms=f"{target}transforms"
            )
        ]

    module.Odd, module.register_load_formats = Odd, register_load_formats
    module.transforms = lambda config: (Rename(r"^x\.", ""),)
    sys.modules[module.__name__] = module
    return module


@pytest.fixture(autouse=True)
def _no_odd_plugin_left():
    yield
    sys.modules.pop("odd_plugin_for_tests", None)


class TestRefusals:
    """Whatever is wrong is said before a parameter has changed."""

    def refuse(self, tmp_path, state, match, **kwargs):
        save(tmp_path, state)
        model = Tiny()
        with pytest.raises(WeightsError, match=match) as caught:
            load(tmp_path, model, **kwargs)
        assert untouched(model)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "name", ["model.layers.1.k_proj.bias", "model.layers.0.norm.weight", "model.scale", "model.router.bias"]
    )
    def test_w4_missing(self, tmp_path, name):
        state = tensors()
        del state[name]
        self.refuse(tmp_path, state, f"no tensor for 1 of its parameters: {name}")

    def test_w4_unknown(self, tmp_path):
        self.refuse(tmp_path, tensors() | {"model.layers.0.q_norm.weight": torch.ones(8)}, r"q_norm\.weight")

    @pytest.mark.parametrize("shape", [(KV, H + 1), (KV + 1, H), (KV * H,), (1, KV, H), (H, KV)])
    def test_w8_shapes(self, tmp_path, shape):
        state = tensors() | {"model.layers.0.k_proj.weight": torch.randn(shape)}
        self.refuse(tmp_path, state, r"model\.layers\.0\.k_proj\.weight is \[.*\], the model wants \[4, 8\]")

    def test_w8_integers_are_not_weights(self, tmp_path):
        state = tensors() | {"model.layers.0.k_proj.weight": torch.ones(KV, H, dtype=torch.int8)}
        self.refuse(tmp_path, state, "is int8, the model wants bfloat16")

    def test_w1_explicit_safetensors_never_falls_back(self, tmp_path):
        torch.save(tensors(), tmp_path / "pytorch_model.bin")
        with pytest.raises(WeightsError, match=r"has no \.safetensors weight files"):
            load(tmp_path, load_format="safetensors")

    def test_a_buffer_left_on_meta_is_named(self, tmp_path):
        save(tmp_path, tensors())
        model = Tiny()
        model.model.register_buffer("lost", torch.empty(2, device="meta"), persistent=False)
        with pytest.raises(WeightsError, match=r"meta device: model\.lost"):
            load(tmp_path, model)


class TestTies:
    def test_w5_absent_and_tied(self, tmp_path):
        """Case 20."""
        state = tensors(tied=True)
        save(tmp_path, state)
        model, report, _ = load(tmp_path, tied=True)
        check_values(model, state)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert report.parameters["lm_head.weight"].status == "tied"

    def test_w5_present_and_equal(self, tmp_path):
        state = tensors(tied=True)
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["lm_head.weight"][2, 3] = state["model.embed_tokens.weight"][2, 3] = float("nan")
        save(tmp_path, state)
        model, report, _ = load(tmp_path, tied=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert report.tensors["lm_head.weight"].status == "tied"

    @pytest.mark.parametrize("rows", [16 << 20, 64])
    def test_w5_present_and_different_in_one_value(self, tmp_path, monkeypatch, rows):
        """Case 20."""
        monkeypatch.setattr("modelbay_runtime.loading._COMPARE_BYTES", rows)  # also compares in several steps
        state = tensors(tied=True)
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["lm_head.weight"][V - 1, H - 1] += 1
        save(tmp_path, state)
        model = Tiny()
        with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight") as caught:
            load(tmp_path, model, tied=True)
        assert "hf_overrides" in str(caught.value)
        assert untouched(model)

    def test_w5_untied_and_present_although_the_module_could_tie(self, tmp_path):
        """Case 20."""
        state = tensors()
        save(tmp_path, state)
        model, _, _ = load(tmp_path, tied=False)
        assert torch.equal(model.lm_head.weight, state["lm_head.weight"].bfloat16())
        assert model.lm_head.weight is not model.model.embed_tokens.weight

    def test_w5_untied_and_absent(self, tmp_path):
        """Case 20."""
        save(tmp_path, tensors(tied=True))
        with pytest.raises(WeightsError, match=r"lm_head\.weight.*tie_word_embeddings is false"):
            load(tmp_path, tied=False)

    def test_w5_only_the_head_was_saved(self, tmp_path):
        state = tensors(tied=True)
        embedding = state.pop("model.embed_tokens.weight")
        save(tmp_path, state | {"lm_head.weight": embedding})
        model, _, _ = load(tmp_path, tied=True)
        assert torch.equal(model.model.embed_tokens.weight, embedding.bfloat16())

    def test_a_parameter_that_the_tree_holds_twice_stays_one(self, tmp_path):
        model = nn.Module()
        model.a, model.b = nn.Module(), nn.Module()
        model.a.weight = model.b.weight = meta_parameter(3, 4)
        save(tmp_path, {"b.weight": torch.ones(3, 4)})
        load(tmp_path, model)
        assert model.a.weight is model.b.weight
        assert model.a.weight.sum() == 12


class TestDummy:
    def test_w6_no_files_finite_seeded_ties_and_buffers(self, tmp_path):
        first, report, _ = load(tmp_path, tied=True, load_format="dummy", seed=3)
        again, _, _ = load(tmp_path, tied=True, load_format="dummy", seed=3)
        other, _, _ = load(tmp_path, tied=True, load_format="dummy", seed=4)
        for name, value in first.named_parameters():
            assert value.isfinite().all(), name
            assert torch.equal(value, again.get_parameter(name)), name
        embed = first.model.embed_tokens.weight
        assert not torch.equal(embed, other.model.embed_tokens.weight)
        assert first.lm_head.weight is embed
        assert first.model.scale.tolist() == [5.0, 5.0]
        assert report.parameters["model.scale"].status == "kept"
        assert (first.model.layers[0].norm.weight == 1).all()
        packed = first.model.layers[0].qkv_proj.packs[0]
        assert packed.std() > 0.1
        assert not torch.equal(packed[:KV], packed[Q : Q + KV])

    def test_w6_ranks_hold_slices_of_the_same_tensor(self, tmp_path):
        def model(shard):
            module = nn.Module()
            module.proj = nn.Module()
            module.proj.weight = meta_parameter(4 if shard else 8, 6)
            module.proj.shards = {"weight": shard} if shard else {}
            return load(tmp_path, module, load_format="dummy")[0].proj.weight

        halves = [model(Shard(0, 0, 4, total=8)), model(Shard(0, 4, 4, total=8))]
        assert torch.equal(torch.cat(halves), model(None))


class TestShards:
    """Layout of a rank's parameters: what world size 1 leaves out, in the loader from the start."""

    def module(self, shape, shard, name="weight"):
        model = nn.Module()
        model.proj = nn.Module()
        model.proj.weight = meta_parameter(*shape)
        model.proj.shards = {name: shard}
        return model

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_slices(self, tmp_path, dim, rank):
        whole = torch.randn(8, 6)
        save(tmp_path, {"proj.weight": whole})
        size = whole.shape[dim] // 2
        shape = [8, 6]
        shape[dim] = size
        model = self.module(shape, Shard(dim, rank * size, size))
        load(tmp_path, model)
        assert torch.equal(model.proj.weight, whole.narrow(dim, rank * size, size).bfloat16())

    def test_padding_is_zero(self, tmp_path):
        whole = torch.randn(11, 6)
        save(tmp_path, {"proj.weight": whole})
        model = self.module((6, 6), Shard(0, 6, 5, pad=1, total=11))
        model.proj.weight = nn.Parameter(torch.full((6, 6), 7.0).bfloat16())  # real memory, with something in it
        load(tmp_path, model)
        assert torch.equal(model.proj.weight[:5], whole[6:].bfloat16())
        assert (model.proj.weight[5] == 0).all()

    def test_sections(self, tmp_path):
        state = {"q": torch.randn(8, 6), "k": torch.randn(4, 6)}
        save(tmp_path, {f"{name}.weight": value for name, value in state.items()})
        model = nn.Module()
        model.qk = nn.Module()
        model.qk.weight = meta_parameter(6, 6)
        model.qk.packed = (Section("q", 0, 4), Section("k", 4, 2))
        model.qk.shards = {"q.weight": Shard(0, 4, 4), "k.weight": Shard(0, 2, 2)}
        load(tmp_path, model)
        assert torch.equal(model.qk.weight, torch.cat([state["q"][4:], state["k"][2:]]).bfloat16())

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_stacked_experts(self, tmp_path, dim):
        experts = {f"experts.{i}.up": torch.randn(4, 6) for i in range(4)}
        save(tmp_path, experts)
        whole = torch.stack(list(experts.values()))
        half = whole.shape[dim] // 2
        part = whole.narrow(dim, half, half)
        model = self.module(part.shape, Shard(dim, half, half))
        stack = Stack(r"experts\.(?P<index>\d+)\.up", "proj.weight")
        _, report, _ = load(tmp_path, model, transforms=(stack,))
        assert torch.equal(model.proj.weight, part.bfloat16())
        elsewhere = {name for name, use in report.tensors.items() if use.rule == "another rank's expert"}
        assert elsewhere == ({"experts.0.up", "experts.1.up"} if dim == 0 else set())

    @pytest.mark.parametrize("rows", [7, 10])
    def test_w8_the_whole_tensor_has_the_wrong_size(self, tmp_path, rows):
        save(tmp_path, {"proj.weight": torch.randn(rows, 6)})
        with pytest.raises(WeightsError, match=r"the model wants \[8, 6\]"):
            load(tmp_path, self.module((4, 6), Shard(0, 4, 4, total=8)))


class TestReport:
    def test_w4_rules_are_counted_and_warned_of(self, tmp_path):
        extra = {"model.layers.0.rotary_emb.inv_freq": torch.ones(4), "model.layers.2.norm.weight": torch.ones(H)}
        state = tensors()
        save(tmp_path, state | extra | {"model.layers.1.table": torch.zeros(4)})
        model, report, trace = load(tmp_path)
        check_values(model, state)
        assert report.ignored_by_rule() == {
            "rotary cache": 1,
            "layer beyond num_hidden_layers": 1,
            "computed by the model": 1,
        }
        assert "1 ignored (rotary cache)" in report.summary()
        assert [item.question for item in trace.warnings()] == ["layer beyond num_hidden_layers"]

    def test_w4_every_section_says_where_it_came_from(self, tmp_path):
        state = tensors()
        save(tmp_path, state)
        _, report, _ = load(tmp_path)
        assert set(report.parameters) == set(state)
        for name, use in report.parameters.items():
            assert use.sources == [("model.safetensors", name)]
        assert report.parameters["model.layers.0.k_proj.weight"].parameter == "model.layers.0.qkv_proj.weight"
        assert report.bytes_read == sum(value.nbytes for value in state.values())
        assert report.bytes_model == sum(value.numel() for value in state.values()) * 2 + 2 * 5  # five stay float32

    def test_strict_off_makes_up_what_is_missing_and_says_so(self, tmp_path):
        state = tensors() | {"strange": torch.ones(1)}
        del state["model.layers.0.k_proj.weight"], state["model.layers.0.norm.weight"], state["model.scale"]
        save(tmp_path, state)
        model, report, trace = load(tmp_path, strict=False)
        assert (model.model.layers[0].norm.weight == 1).all()
        assert model.model.layers[0].qkv_proj.packs[0].isfinite().all()
        assert model.model.scale.tolist() == [5.0, 5.0]
        assert report.parameters["model.layers.0.k_proj.weight"].status == "initialised"
        assert len(trace.warnings()) == 2
        assert "2 initialised, not loaded" in report.summary()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's peak of this process")
@pytest.mark.parametrize("format", ["safetensors", "pt"])
@pytest.mark.parametrize("disk", ["float32", "bfloat16"])
def test_w7_peak_memory_while_loading(tmp_path, format, disk):
    """Below 1.15 × the model in its own dtype plus the largest tensor on disk; the peak is reset right before."""
    layers, side = 24, 1024
    build = f"""
        model = nn.Module()
        for i in range({layers}):
            layer = nn.Module()
            layer.weight = meta_parameter({side}, 4 * {side})
            model.add_module(f"layer{{i}}", layer)
    """
    state = {f"layer{i}.weight": torch.ones(side, 4 * side, dtype=getattr(torch, disk)) for i in range(layers)}
    largest = max(value.nbytes for value in state.values())
    if format == "pt":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")
    peak, model_bytes = peak_of_loading(tmp_path, build)
    assert model_bytes == layers * side * side * 4 * 2
    assert peak < 1.15 * model_bytes + largest
