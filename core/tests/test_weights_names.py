"""W4: transforms as data against the same operation in torch; names matched, tied, or ignored by a named rule."""

from types import SimpleNamespace

import pytest
import torch

from modelbay.errors import PluginError, WeightsError
from modelbay.weights.formats import TensorEntry
from modelbay.weights.matching import BEYOND, COMPUTED, Expected, match_names
from modelbay.weights.names import make_pieces
from modelbay.weights.pieces import Piece
from modelbay.weights.transforms import Ignore, Rename, Reshape, Split, Stack, Transpose
from modelbay_testing.records import apply_piece

CONFIG = SimpleNamespace(
    num_heads=4, num_kv_heads=2, head_size=3, hidden_size=12, intermediate_size=5, get={"extra_size": 7}.get
)


def apply(tensors, *transforms, model=None):
    """What the transforms make of real tensors: pieces applied, stacks and what is joined put together."""
    entries = {
        name: TensorEntry(name, tuple(value.shape), "float32", "f", value.nbytes) for name, value in tensors.items()
    }
    results = {}
    for piece in make_pieces(entries, transforms, CONFIG, model):
        if piece.rule:
            continue
        index, steps = piece.index()
        value = tensors[piece.source] if index is None else tensors[piece.source][index]
        for step in steps:
            value = step.apply(value)
        assert torch.equal(value, apply_piece(piece, tensors[piece.source]))
        assert tuple(value.shape) == piece.shape
        if piece.slot is None and piece.span is None:
            assert piece.name not in results
            results[piece.name] = value
        else:
            whole = results.setdefault(piece.name, torch.full(piece.full_shape, float("nan")))
            place = piece.place_in(whole)
            assert place.isnan().all()
            place.copy_(value)
    return results


def test_w4_rename_is_applied_in_order():
    found = apply(
        {"backbone.h.0.w": torch.ones(1)}, Rename(r"^backbone\.", "model."), Rename(r"\.h\.(\d+)\.", r".layers.\1.")
    )
    assert set(found) == {"model.layers.0.w"}


def test_w4_split_by_facts():
    fused = torch.randn(24, 12)
    found = apply({"a.qkv.weight": fused}, Split("qkv", ("q", "k", "v"), ("q_size", "kv_size", "kv_size")))
    q, k, v = fused.split([12, 6, 6])
    assert torch.equal(found["a.q.weight"], q)
    assert torch.equal(found["a.k.weight"], k)
    assert torch.equal(found["a.v.weight"], v)


def test_w4_split_along_another_dim_of_a_split():
    value = torch.randn(12, 10)
    found = apply({"w": value}, Split("^w", ("a", "b"), (4, 8)), Split("^b", ("c", "d"), (7, 3), dim=-1))
    assert torch.equal(found["c"], value[4:, :7])
    assert torch.equal(found["d"], value[4:, 7:])


def test_w4_stack_in_the_order_of_the_numbers_not_of_the_names():
    tensors = {f"experts.{i}.up.weight": torch.randn(2, 3) for i in (10, 2, 0, 1, *range(3, 10))}
    found = apply(tensors, Stack(r"experts\.(?P<index>\d+)\.up\.weight", "experts.up"))
    assert torch.equal(found["experts.up"], torch.stack([tensors[f"experts.{i}.up.weight"] for i in range(11)]))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_w4_stack_dim(dim):
    tensors = {f"e.{i}": torch.randn(2, 3) for i in range(4)}
    found = apply(tensors, Stack(r"e\.(?P<index>\d+)", "e", dim=dim))
    assert torch.equal(found["e"], torch.stack(list(tensors.values()), dim=dim))


@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (0, 2), (-1, 0), (1, 1)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_w4_transpose_after_stack(dims, dim):
    tensors = {f"e.{i}": torch.randn(2, 3) for i in range(4)}
    found = apply(tensors, Stack(r"e\.(?P<index>\d+)", "e", dim=dim), Transpose("^e$", dims))
    assert torch.equal(found["e"], torch.stack(list(tensors.values()), dim=dim).transpose(*dims))


@pytest.mark.parametrize(("cut", "sizes"), [(0, (1, 3)), (1, (1, 1)), (2, (2, 1))])
def test_w4_split_after_stack(cut, sizes):
    tensors = {f"e.{i}": torch.randn(2, 3) for i in range(4)}
    found = apply(tensors, Stack(r"e\.(?P<index>\d+)", "e"), Split("^e$", ("x", "y"), sizes, dim=cut))
    x, y = torch.stack(list(tensors.values())).split(sizes, dim=cut)
    assert torch.equal(found["x"], x)
    assert torch.equal(found["y"], y)


def test_w4_transpose():
    value = torch.randn(3, 4)
    assert torch.equal(apply({"c_attn.weight": value}, Transpose("c_attn"))["c_attn.weight"], value.t())


def test_w4_reshape_undoes_a_rotary_permutation():
    value = torch.randn(24, 12)
    permuted = value.view(4, 2, 3, 12).transpose(1, 2).reshape(24, 12)
    found = apply({"q": permuted}, Reshape("q", ("num_heads", -1, 2, "hidden_size"), (0, 2, 1, 3)))
    assert torch.equal(found["q"], value)


def test_w4_a_key_of_the_config_as_size():
    found = apply({"w": torch.randn(12)}, Split("w", ("a", "b"), ("intermediate_size", "extra_size")))
    assert [value.shape[0] for value in found.values()] == [5, 7]


@pytest.mark.parametrize(
    ("tensors", "transform", "message"),
    [
        ({"w": (5,)}, Split("w", ("a", "b"), (2, 2)), r"has 5 entries along dimension 0, not \[2, 2\]"),
        ({"w": (5,)}, Split("w", ("a", "b"), (2, 3), dim=1), "dimension 1"),
        ({"w": (5,)}, Reshape("w", (2, -1), (1, 0)), "cannot be viewed"),
        ({"e.0": (2,), "e.2": (2,)}, Stack(r"e\.(?P<index>\d+)", "e"), "numbers 0, 2"),
        ({"e.0": (2,), "e.1": (3,)}, Stack(r"e\.(?P<index>\d+)", "e"), "different shapes"),
        ({"w": (5,)}, Transpose("w"), "dimension 1"),
    ],
)
def test_w4_a_tensor_that_a_transform_does_not_fit(tensors, transform, message):
    with pytest.raises(WeightsError, match=message):
        apply({name: torch.zeros(shape) for name, shape in tensors.items()}, transform)


@pytest.mark.parametrize(
    "transform",
    [Rename("(", ""), Split("w", ("a",), (2, 3)), Split("w", ("a", "b"), ("no_such_fact", 1)), Stack("w", "w"),
     Reshape("w", (5,), (1,))],
)  # fmt: skip
def test_w4_a_transform_that_is_not_well_formed(transform):
    with pytest.raises(PluginError):
        apply({"w": torch.zeros(5)}, transform)


def pieces(*names, shape=(2,)):
    return [Piece(name, name, shape) for name in names]


NAMES = ("model.embed.weight", "model.layers.0.w", "model.layers.1.w")


def match(disk, names=NAMES, **kwargs):
    named = [item if isinstance(item, Piece) else pieces(item)[0] for item in disk]
    return match_names(named, Expected(names, **kwargs))


@pytest.mark.parametrize("change", [str, lambda n: n.removeprefix("model."), lambda n: "model." + n])
def test_w4_prefix_absent_or_extra(change):
    """Case 31."""
    found = match([*map(change, NAMES)])
    assert {piece.name for piece in found.loaded} == set(NAMES)
    assert {piece.source for piece in found.loaded} == {change(name) for name in NAMES}


def test_w4_known_caches_are_ignored_by_a_rule_that_has_a_name():
    """Case 31."""
    disk = pieces(*NAMES, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.cos_cached")
    disk += pieces("model.embeddings.position_ids", shape=(1, 8))
    disk += pieces("h.0.attn.bias", shape=(1, 1, 8, 8)) + pieces("h.0.attn.masked_bias", shape=())
    found = match(disk)
    assert [rule for _, rule in found.ignored] == ["rotary cache"] * 2 + ["position ids", "causal mask", "mask value"]


def test_w4_a_bias_is_not_mistaken_for_a_mask():
    with pytest.raises(WeightsError, match=r"h\.0\.attn\.bias"):
        match([*NAMES, "h.0.attn.bias"])


def test_w4_a_parameter_of_a_cache_s_name_is_loaded():
    found = match(["rotary_emb.inv_freq"], ("rotary_emb.inv_freq",))
    assert len(found.loaded) == 1


def test_w4_buffers_that_the_model_computes_are_not_loaded():
    found = match([*NAMES, "layers.0.table"], computed=("model.layers.0.table",))
    assert [rule for _, rule in found.ignored] == [COMPUTED]


def test_w4_layers_beyond_the_model_are_skipped_only_in_its_own_stack():
    """Case 33."""
    found = match([*NAMES, "model.layers.2.w", "layers.3.mtp.w"], num_layers=2)
    assert [rule for _, rule in found.ignored] == [BEYOND] * 2
    with pytest.raises(WeightsError, match=r"vision\.layers\.2\.w"):
        match([*NAMES, "vision.layers.2.w"], num_layers=2)
    with pytest.raises(WeightsError, match=r"layers\.1\.extra"):
        match([*NAMES, "model.layers.1.extra"], num_layers=2)


def test_w4_unknown_and_missing_are_listed_together():
    with pytest.raises(WeightsError) as caught:
        match(["model.embed.weight", "model.layers.0.w", "model.strange"])
    assert "1 tensors that the model does not have: model.strange" in str(caught.value)
    assert "no tensor for 1 of its parameters: model.layers.1.w" in str(caught.value)


def test_w4_sections_each_count():
    names = ("a.q", "a.k", "a.v")
    with pytest.raises(WeightsError, match=r"no tensor for 1 of its parameters: a\.k"):
        match(["a.q", "a.v"], names, fused={"a.qkv": names})
    assert len(match(["a.qkv"], names, fused={"a.qkv": names}).loaded) == 1
    with pytest.raises(WeightsError, match=r"two tensors fill 'a\.q': "):
        match(["a.qkv", "a.q"], names, fused={"a.qkv": names})


def test_w2_two_tensors_for_one_name():
    with pytest.raises(WeightsError, match=r"two tensors fill 'model\.layers\.0\.w'"):
        match([*NAMES, "layers.0.w"])


def test_w5_absent_and_untied_is_an_error_that_says_so():
    with pytest.raises(WeightsError, match="tie_word_embeddings is false"):
        match(NAMES, (*NAMES, "lm_head.weight"))


def test_w5_a_tied_name_stands_in_for_an_absent_embedding():
    found = match(["lm_head.weight", *NAMES[1:]], tied={"lm_head.weight": "model.embed.weight"})
    assert ("lm_head.weight", "model.embed.weight") in [(piece.source, piece.name) for piece in found.loaded]


def test_w4_a_plugin_s_ignore_rule():
    entries = {"w": TensorEntry("w", (1,), "float32", "f", 4)}
    found = match_names(make_pieces(entries, (Ignore("^w$", "my rule"),), CONFIG), Expected(()))
    assert found.ignored[0][1] == "my rule"


def test_strict_off_lets_unknown_and_missing_pass_by_name():
    found = match_names(pieces(*NAMES[:2], "strange"), Expected(NAMES), strict=False)
    assert found.missing == [NAMES[2]]
    assert [piece.source for piece, _ in found.ignored] == ["strange"]
