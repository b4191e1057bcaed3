"""W7: weights that their module repacks are read into memory that serves the next one, or from the mapped file."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelbay.errors import PluginError
from modelbay.weights.safetensors import SafetensorsSource
from modelbay_runtime.layout import Section, Shard
from modelbay_testing.bare_loading import load_bare, meta_parameter, peak_of_loading

OUT, IN, LAYERS = 6, 4, 3


class Repacked(nn.Module):
    """Keeps its weight negated, and remembers where it was read from."""

    repacked = ("weight",)

    def __init__(self, out: int = OUT, *, bias: bool = False, parts: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.weight = meta_parameter(out, IN)
        self.bias = meta_parameter(out) if bias else None
        self.seen = 0
        if parts:
            size = out // len(parts)
            self.packed = tuple(Section(name, i * size, size) for i, name in enumerate(parts))

    def post_load(self) -> None:
        self.seen = self.weight.data_ptr()
        self.weight = nn.Parameter(-self.weight.data, requires_grad=False)


def load(root: Path, model: nn.Module, **options):
    return model, *load_bare(root, model, **options)


def model_of(make, count: int = LAYERS) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(make() for _ in range(count))
    return model


def layer_of(**projections: nn.Module) -> nn.Module:
    layer = nn.Module()
    for name, projection in projections.items():
        layer.add_module(name, projection)
    return layer


@pytest.fixture
def mapped(monkeypatch) -> dict[str, int]:
    """name -> where the file's bytes of it were mapped."""
    found = {}
    read = SafetensorsSource.read

    def recording(self, name, index=None):
        values = read(self, name, index)
        found[name] = values.data_ptr()
        return values

    monkeypatch.setattr(SafetensorsSource, "read", recording)
    return found


def test_w7_a_weight_in_the_right_dtype_is_repacked_from_the_file(tmp_path: Path, mapped: dict[str, int]) -> None:
    state = {f"layers.{i}.o.weight": torch.randn(OUT, IN).bfloat16() for i in range(LAYERS)}
    save_file(state, tmp_path / "model.safetensors")
    model, report, _ = load(tmp_path, model_of(lambda: layer_of(o=Repacked())))
    for i, layer in enumerate(model.layers):
        name = f"layers.{i}.o.weight"
        assert torch.equal(layer.o.weight, -state[name])
        assert layer.o.seen == mapped[name]
    assert report.bytes_model == sum(value.nbytes for value in state.values())


def test_w7_rows_of_a_rank_are_repacked_from_the_file_and_columns_are_copied(tmp_path: Path, mapped: dict) -> None:
    whole = torch.randn(2 * OUT, 2 * IN).bfloat16()
    save_file(
        {"rows.weight": whole[:, :IN].contiguous(), "columns.weight": whole[:OUT].contiguous()},
        tmp_path / "m.safetensors",
    )
    rows, columns = Repacked(), Repacked()
    rows.shards = {"weight": Shard(0, OUT, OUT, total=2 * OUT)}
    columns.shards = {"weight": Shard(1, IN, IN, total=2 * IN)}
    load(tmp_path, layer_of(rows=rows, columns=columns))
    assert torch.equal(rows.weight, -whole[OUT:, :IN])
    assert torch.equal(columns.weight, -whole[:OUT, IN:])
    assert rows.seen == mapped["rows.weight"]
    assert columns.seen != mapped["columns.weight"]


@pytest.mark.parametrize("disk", [torch.float32, torch.bfloat16])
def test_w7_what_has_parts_or_another_dtype_is_read_into_the_same_memory(tmp_path: Path, disk: torch.dtype) -> None:
    state = {}
    for i in range(LAYERS):
        for name in ("gate", "up"):
            state[f"layers.{i}.{name}.weight"] = torch.randn(OUT // 2, IN).to(disk)
    save_file(state, tmp_path / "model.safetensors")
    model, _, _ = load(tmp_path, model_of(lambda: layer_of(gate_up=Repacked(parts=("gate", "up")))))
    for i, layer in enumerate(model.layers):
        expected = torch.cat([state[f"layers.{i}.{name}.weight"] for name in ("gate", "up")]).bfloat16()
        assert torch.equal(layer.gate_up.weight, -expected)
    assert len({layer.gate_up.seen for layer in model.layers}) == 1


def test_w7_what_is_incomplete_keeps_its_memory(tmp_path: Path) -> None:
    """On disk all gates come before the first up."""
    state = {
        f"{name}{i}.weight": torch.randn(OUT // 2, IN).bfloat16() for name in ("gate", "up") for i in range(LAYERS)
    }
    save_file(state, tmp_path / "model.safetensors")
    model = nn.Module()
    for i in range(LAYERS):
        model.add_module(f"gate_up{i}", Repacked(parts=(f"gate{i}", f"up{i}")))
    load(tmp_path, model)
    for i in range(LAYERS):
        module = getattr(model, f"gate_up{i}")
        assert torch.equal(module.weight, -torch.cat([state[f"gate{i}.weight"], state[f"up{i}.weight"]]))
    assert len({getattr(model, f"gate_up{i}").seen for i in range(LAYERS)}) == LAYERS


def test_w7_a_weight_that_waits_for_its_bias_is_copied_before_the_file_is_let_go(tmp_path: Path, mapped: dict) -> None:
    names = ("a", "b")
    state = {f"{name}.weight": torch.randn(OUT, IN).bfloat16() for name in names}
    save_file(state, tmp_path / "1.safetensors")
    biases = {f"{name}.bias": torch.randn(OUT).bfloat16() for name in names}
    save_file(biases, tmp_path / "2.safetensors")
    model = layer_of(a=Repacked(bias=True), b=Repacked(bias=True))
    load(tmp_path, model)
    for name in names:
        module = getattr(model, name)
        assert torch.equal(module.weight, -state[f"{name}.weight"])
        assert torch.equal(module.bias, biases[f"{name}.bias"])
        assert module.seen != mapped[f"{name}.weight"]


def test_w7_a_tied_weight_is_memory_of_its_own(tmp_path: Path, mapped: dict) -> None:
    """The embedding keeps it, though the head repacks it."""
    weight = torch.randn(OUT, IN).bfloat16()
    save_file({"embed.weight": weight}, tmp_path / "model.safetensors")
    embed, head = nn.Module(), Repacked()
    embed.weight = meta_parameter(OUT, IN)
    head.tied_to = "embed.weight"
    load(tmp_path, layer_of(embed=embed, head=head), tied=True)
    assert torch.equal(embed.weight, weight)
    assert torch.equal(head.weight, -weight)
    assert embed.weight.data_ptr() not in mapped.values()


def test_w7_missing_parts_are_made_up_in_lent_memory(tmp_path: Path) -> None:
    state = {f"layers.{i}.up.weight": torch.randn(OUT // 2, IN).bfloat16() for i in range(LAYERS)}
    save_file(state, tmp_path / "model.safetensors")
    model, report, _ = load(tmp_path, model_of(lambda: layer_of(gate_up=Repacked(parts=("gate", "up")))), strict=False)
    for i, layer in enumerate(model.layers):
        assert torch.equal(layer.gate_up.weight[OUT // 2 :], -state[f"layers.{i}.up.weight"])
        assert report.parameters[f"layers.{i}.gate.weight"].status == "initialised"


def test_a_module_that_keeps_what_it_was_lent_is_refused(tmp_path: Path) -> None:
    class Keeping(Repacked):
        def post_load(self) -> None:
            self.weight = nn.Parameter(self.weight.data, requires_grad=False)

    save_file({"o.weight": torch.randn(OUT, IN)}, tmp_path / "model.safetensors")
    with pytest.raises(PluginError, match=r"Keeping\.post_load keeps o\.weight"):
        load(tmp_path, layer_of(o=Keeping()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's peak of this process")
@pytest.mark.parametrize("disk", ["float32", "bfloat16"])
def test_w7_peak_memory_while_loading_into_another_form(tmp_path: Path, disk: str) -> None:
    """Below 1.05 × the model and its largest tensor on disk."""
    layers, side = 24, 1024
    build = f"""
        class Repacked(nn.Module):
            repacked = ("weight",)

            def __init__(self, parts):
                super().__init__()
                self.weight = meta_parameter({side}, 4 * {side})
                self.packed = tuple(Section(name, i * {side} // 2, {side} // 2) for i, name in enumerate(parts))

            def post_load(self):
                self.weight = nn.Parameter(-self.weight.data, requires_grad=False)

        model = nn.Module()
        for i in range({layers}):
            model.add_module(f"layer{{i}}", Repacked((f"{{i:02}}.gate", f"{{i:02}}.up")))
    """
    state = {
        f"{i:02}.{part}.weight": torch.ones(side // 2, 4 * side, dtype=getattr(torch, disk))
        for i in range(layers)
        for part in ("gate", "up")
    }
    save_file(state, tmp_path / "model.safetensors")
    peak, model_bytes = peak_of_loading(tmp_path, build)
    assert model_bytes == layers * side * side * 4 * 2
    largest = 2 * side * side * 4  # a packed one in the dtype of the model
    assert peak < 1.05 * model_bytes + largest + max(value.nbytes for value in state.values())
