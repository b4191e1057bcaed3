"""W4: every operation that Transformers' conversion mappings are made of, against that operation itself."""

from types import SimpleNamespace

import pytest
import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    GroupWeightRename,
    Inkling2IndexOffsetWeightRename,
    Interleave,
    LayerPairCollapse,
    MergeModulelist,
    PermuteForRope,
    PrefixChange,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from modelbay.errors import BackendError
from modelbay.weights.formats import TensorEntry
from modelbay.weights.matching import Expected, Known
from modelbay.weights.names import make_pieces
from modelbay_testing.records import apply_piece
from modelbay_transformers.conversion import compile_mapping

CONFIG = SimpleNamespace(num_attention_heads=2, get_text_config=lambda: SimpleNamespace(num_hidden_layers=3))
#: Of the model that is loaded.
SHAPES = {"f": (6, 4), "l.q": (5, 2), "l.k": (2, 2), "l.v": (1, 2)}


def converted(mapping, tensors):
    """What the compiled mapping makes of the tensors, by name."""
    entries = {name: TensorEntry(name, tuple(value.shape), "float32", "f", 0) for name, value in tensors.items()}
    known = Known(Expected(tuple(SHAPES), shapes=SHAPES))
    results = {}
    for piece in make_pieces(entries, compile_mapping(mapping, CONFIG), SimpleNamespace(), known):
        whole = results.setdefault(piece.name, torch.full(piece.full_shape, float("nan")))
        piece.place_in(whole).copy_(apply_piece(piece, tensors[piece.source]))
    return results


def by_transformers(entry, tensors):
    """What a converter itself makes of the tensors of one group."""
    for name, value in tensors.items():
        renamed, pattern = entry.rename_source_key(name)
        entry.add_tensor(renamed, name, pattern, lambda value=value: value.clone())
    model = SimpleNamespace(get_parameter=lambda name: torch.empty(SHAPES[name]))
    found = entry.convert(renamed, model=model, config=CONFIG)
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


CONVERTERS = {
    "chunk": (lambda: WeightConverter("qkv", ["q", "k", "v"], [Chunk(0)]), {"l.qkv": (12, 5)}),
    "chunk of the last": (lambda: WeightConverter("qkv", ["q", "k"], [Chunk(-1)]), {"l.qkv.weight": (3, 8)}),
    "split": (lambda: WeightConverter("qkv", ["q", "k", "v"], [Split(0)]), {"l.qkv": (8, 2)}),
    "chunk and permute some": (
        lambda: WeightConverter("qkv", ["q", "k", "v"], [Chunk(0), PermuteForRope(None, ["q", "k"])]),
        {"l.qkv": (24, 5)},
    ),
    "chunk and permute a bias": (
        lambda: WeightConverter("qkv", ["q", "k"], [Chunk(0), PermuteForRope()]),
        {"l.qkv": (16,)},
    ),
    "permute": (lambda: WeightConverter("wq", "q", [PermuteForRope()]), {"wq.weight": (12, 5)}),
    "permute back": (lambda: WeightConverter("wq", "q", [PermuteForRope(inverse=True)]), {"wq.weight": (12, 5)}),
    "interleave": (lambda: WeightConverter("w13", "gate_up", [Interleave(1)]), {"w13": (2, 6, 3)}),
    "interleave back": (lambda: WeightConverter("w13", "gate_up", [Interleave(0, inverse=True)]), {"w13": (6, 3)}),
    "interleave and chunk": (
        lambda: WeightConverter("w13", ["gate", "up"], [Interleave(0), Chunk(0)]),
        {"m.w13.weight": (6, 3)},
    ),
    "transpose": (lambda: WeightConverter("e", "f", [Transpose(1, 2)]), {"e": (2, 6, 3)}),
    "transpose what does not fit": (
        lambda: WeightConverter("e", "f", [Transpose(0, 1, check_dims=True)]),
        {"e": (4, 6)},
    ),
    "transpose not what fits": (lambda: WeightConverter("e", "f", [Transpose(0, 1, check_dims=True)]), {"e": (6, 4)}),
    "concatenate": (
        lambda: WeightConverter(["q", "k", "v"], "qkv", [Concatenate(0)]),
        {"v": (1, 2), "k": (2, 2), "q": (3, 2)},
    ),
    "concatenate by number": (
        lambda: WeightConverter("shard_*.weight", "weight", [Concatenate(0)]),
        {f"shard_{i}.weight": (i + 1, 2) for i in range(11)},
    ),
    "merge": (
        lambda: WeightConverter("e.*.a.weight", "e.a", [MergeModulelist(1)]),
        {f"x.e.{i}.a.weight": (2, 3) for i in range(3)},
    ),
    "merge and concatenate": (
        lambda: WeightConverter(["e.*.a", "e.*.b"], "e.ab", [MergeModulelist(0), Concatenate(1)]),
        {f"e.{i}.{part}": (2, 3) for part in "ab" for i in range(11)},
    ),
    "merge, concatenate and transpose": (
        lambda: WeightConverter(["e.*.a", "e.*.b"], "e.ab", [MergeModulelist(0), Concatenate(1), Transpose(1, 2)]),
        {f"e.{i}.{part}": (2, 3) for part in "ab" for i in range(3)},
    ),
}


@pytest.mark.parametrize("case", CONVERTERS)
def test_w4_converters(case):
    make, shapes = CONVERTERS[case]
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    found, expected = converted([make()], tensors), by_transformers(make(), tensors)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


RENAMINGS = {
    "remove a prefix": (lambda: PrefixChange(prefix_to_remove="new"), ["new.layers.0.w", "layers.0.new.w"]),
    "add a prefix": (
        lambda: PrefixChange(prefix_to_add="language_model", model_prefix="model"),
        ["model.layers.0", "model.language_model.layers.0", "lm_head"],
    ),
    "a word": (lambda: WeightRenaming("fc1", "up"), ["fc1.weight", "fc11.weight", "m.fc1", "fc1.fc1.w"]),
    "a group": (lambda: WeightRenaming(r"layers\.(\d+)\.fc", r"h.\1.mlp"), ["layers.10.fc.w", "layers.x.fc"]),
    "the beginning": (
        lambda: WeightRenaming(r"^model(?!\.vision)", "model.text"),
        ["model.norm", "model.vision.norm", "norm.model"],
    ),
    "two patterns": (lambda: WeightRenaming([r"^a\.b\.b", r"^b\.a"], "a.b"), ["a.b.b.w", "b.a.w", "x.b.a"]),
    "anything between": (
        lambda: WeightRenaming("layer.*.inv_freq", "inv_freq"),
        ["enc.layer.3.rot.inv_freq", "inv_freq"],
    ),
    "an escaped target": (lambda: WeightRenaming(r"\.attn\.", r"\.self_attn\."), ["l.attn.q", "l.attn"]),
    "an offset": (
        lambda: Inkling2IndexOffsetWeightRename(r"queries\.(\d+)", r"layers.\1.query", offset=1),
        ["queries.0", "queries.2.w", "queries"],
    ),
}


@pytest.mark.parametrize("scope", [None, "", "text"])
@pytest.mark.parametrize("case", RENAMINGS)
def test_w4_renamings(case, scope):
    """Also those of a submodel, which are for names under it alone."""
    make, names = RENAMINGS[case]
    entry = make()
    entry.scope_prefix, entry.base_model_prefix = scope, None if scope is None else "model"
    changed = 0
    for name in [prefix + name for name in names for prefix in ("", "model.", "text.", "model.text.", "other.")]:
        expected = entry.rename_source_key(name)[0]
        assert list(converted([entry], {name: torch.zeros(1)})) == [expected]
        changed += expected != name
    assert changed


def test_w4_every_renaming_then_one_converter():
    mapping = [
        WeightConverter("attn.qkv", ["attn.q", "attn.k"], [Chunk(0)]),
        WeightConverter("attn.q", "attn.never", [Transpose(0, 0)]),
        WeightRenaming("att", "attention"),
        WeightRenaming("attention", "attn"),
    ]
    assert set(converted(mapping, {"h.att.qkv": torch.zeros(4)})) == {"h.attn.q", "h.attn.k"}


def test_w4_a_converter_of_a_submodel():
    entry = WeightConverter("^qkv", ["q", "k"], [Chunk(0)])
    entry.scope_prefix, entry.base_model_prefix = "text", "model"
    names = ("model.text.qkv", "text.qkv", "qkv", "model.vision.qkv")
    found = converted([entry], {name: torch.arange(4.0) for name in names})
    assert set(found) == {"model.text.q", "model.text.k", "text.q", "text.k", "qkv", "model.vision.qkv"}
    assert found["text.k"].tolist() == [2, 3]


def test_w4_two_layers_of_the_disk_are_one():
    parts = ("mixer.q.weight", "attn_alpha", "mlp_alpha", "norm")
    for name in [f"layers.{i}.{part}" for i in range(6) for part in parts]:
        (renamed,) = converted([LayerPairCollapse()], {name: torch.zeros(1)})
        assert renamed == LayerPairCollapse().rename_source_key(name)[0]


class Fancy(Chunk):
    """An operation of a Transformers to come."""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: WeightConverter("a", "b", [Fancy()]), "Fancy"),
        (lambda: WeightConverter("a", ["b", "c"], [Split(), Transpose()]), "Split"),
        (lambda: WeightConverter(["a", "b"], "c", [MergeModulelist()]), "MergeModulelist"),
        (lambda: WeightConverter("e.*.a", "b", [Transpose()]), "Transpose"),
        (lambda: WeightConverter("a", ["b", "c"], [Transpose()]), "Transpose"),
        (lambda: GroupWeightRename(["a0", "a1"], ["a1", "a2"]), "GroupWeightRename"),
        (lambda: SimpleNamespace(), "SimpleNamespace"),
    ],
)
def test_w4_what_cannot_be_expressed_is_an_error_that_names_it(make, name):
    with pytest.raises(BackendError, match=f"converts checkpoints of this model by {name}"):
        compile_mapping([make()], CONFIG)
