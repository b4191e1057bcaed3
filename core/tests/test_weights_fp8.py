"""W4, dequantise: blocks times their scales, alone and under the transforms that follow."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelbay.errors import ConfigError, PluginError, WeightsError
from modelbay.weights.formats import TensorEntry
from modelbay.weights.fp8 import fp8_transforms
from modelbay.weights.names import make_pieces
from modelbay.weights.transforms import Chain, Dequantise, Rename, Split, Stack

CONFIG = SimpleNamespace(quantization={"quant_method": "fp8", "weight_block_size": [4, 3]}, get={}.get)


def entries(tensors):
    return {
        name: TensorEntry(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), "f", t.nbytes)
        for name, t in tensors.items()
    }


def value(piece, tensors):
    found = piece.scale.apply(tensors[piece.source], tensors[piece.scale.source])
    for step in piece.steps[1:]:
        found = step.apply(found)
    return found


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), block=st.tuples(st.integers(1, 5), st.integers(1, 5)))
@settings(max_examples=60, deadline=None)
def test_w4_every_value_is_scaled_by_its_block(rows, columns, block) -> None:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales}
    config = SimpleNamespace(quantization={"weight_block_size": list(block)})
    [piece] = make_pieces(entries(tensors), fp8_transforms(config), config)
    assert piece.sources == ("a.weight", "a.weight_scale_inv")
    expected = torch.tensor(
        [
            [float(weight[i, j]) * float(scales[i // block[0], j // block[1]]) for j in range(columns)]
            for i in range(rows)
        ]
    )
    torch.testing.assert_close(value(piece, tensors), expected)


def test_w4_only_tensors_in_8_bits_and_before_all_else() -> None:
    """Names are those on disk, wherever the transform stands; what comes after sees plain tensors."""
    tensors = {
        "x.experts.0.weight": torch.ones(8, 6).to(torch.float8_e4m3fn),
        "x.experts.0.weight_scale_inv": torch.full((2, 2), 2.0),
        "x.experts.1.weight": torch.ones(8, 6),
        "norm.weight": torch.ones(6),
    }
    transforms = (
        Rename(r"^x\.", "y."),
        Split(r"weight$", ("top", "bottom"), "equal"),
        Stack(r"experts\.(?P<index>\d+)\.bottom$", "experts.bottom"),
        *fp8_transforms(CONFIG),
    )
    only = {name: entry for name, entry in entries(tensors).items() if name != "norm.weight"}
    found = make_pieces(only, transforms, CONFIG)
    assert sorted({piece.name for piece in found}) == ["y.experts.0.top", "y.experts.1.top", "y.experts.bottom"]
    scaled = [piece for piece in found if piece.scale]
    assert [piece.source for piece in scaled] == ["x.experts.0.weight"] * 2
    assert all(torch.equal(value(piece, tensors), torch.full((4, 6), 2.0)) for piece in scaled)
    assert all(piece.index()[0] is None for piece in scaled), "a part is cut out after scaling"
    [norm] = make_pieces(entries({"norm.weight": tensors["norm.weight"]}), fp8_transforms(CONFIG), CONFIG)
    assert norm.scale is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"a\.weight is float8_e4m3fn, and .* a\.weight_scale_inv, is absent"),
        ({"a.weight_scale_inv": torch.ones(2, 3)}, r"float32 \[2, 3\]; a\.weight \[8, 6\] .* 4 × 3 needs .*\[2, 2\]"),
        ({"a.weight_scale_inv": torch.ones(4)}, r"float32 \[4\]"),
        ({"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, r"int32 \[2, 2\]"),
    ],
)
def test_w4_scales_that_do_not_fit_are_named(tensors, message) -> None:
    tensors = {"a.weight": torch.ones(8, 6).to(torch.float8_e4m3fn), **tensors}
    with pytest.raises(WeightsError, match=message):
        make_pieces(entries(tensors), fp8_transforms(CONFIG), CONFIG)


def test_w4_a_weight_that_is_no_matrix_is_refused() -> None:
    tensors = {"a.weight": torch.ones(2, 8, 6).to(torch.float8_e5m2), "a.weight_scale_inv": torch.ones(2, 2, 2)}
    with pytest.raises(WeightsError, match=r"float8_e5m2 of shape .* two dimensions"):
        make_pieces(entries(tensors), fp8_transforms(CONFIG), CONFIG)


@pytest.mark.parametrize("block", [None, 128, [128], [128, 0], ["a", "b"]])
def test_c11_scales_of_another_kind_are_refused(block) -> None:
    with pytest.raises(ConfigError, match="weight_block_size"):
        fp8_transforms(SimpleNamespace(quantization={"quant_method": "fp8", "weight_block_size": block}))


def test_dequantise_within_a_chain_is_refused() -> None:
    chain = Chain((r"weight$",), (Dequantise(r"weight$", "scale", (4, 3)),))
    with pytest.raises(PluginError, match="as they are on disk"):
        make_pieces(entries({"a.weight": torch.ones(2, 2)}), (chain,), CONFIG)
