"""W4, X7: transforms that join, take apart and choose, against the same operation in torch; layouts that differ."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelbay.errors import PluginError, WeightsError
from modelbay.weights.formats import TensorEntry
from modelbay.weights.matching import Expected, Known, match_names
from modelbay.weights.names import adapt_pieces, make_pieces
from modelbay.weights.pieces import Piece
from modelbay.weights.transforms import (
    Chain,
    Concat,
    FirstOf,
    Ignore,
    Rename,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from modelbay_testing.records import apply_piece

CONFIG = SimpleNamespace(num_heads=4, get={}.get)
EXPERT = r"experts\.(?P<index>\d+)\."
PACK = (
    Stack(EXPERT + "gate", "experts.#gate"),
    Stack(EXPERT + "up", "experts.#up"),
    Concat((r"#gate$", r"#up$"), "gate_up", dim=1),
)


def entries_of(tensors):
    return {
        name: TensorEntry(name, tuple(value.shape), "float32", "f", value.nbytes) for name, value in tensors.items()
    }


def put_together(pieces, tensors):
    """The tensors that pieces make, each place filled once; and what reading by index gives is what `apply` gives."""
    results = {}
    for piece in pieces:
        if piece.rule:
            continue
        index, steps = piece.index()
        value = tensors[piece.source] if index is None else tensors[piece.source][index]
        for step in steps:
            value = step.apply(value)
        assert torch.equal(value, apply_piece(piece, tensors[piece.source]))
        assert tuple(value.shape) == piece.shape
        whole = results.setdefault(piece.name, torch.full(piece.full_shape, float("nan")))
        place = piece.place_in(whole)
        assert place.isnan().all()
        place.copy_(value)
    assert not any(value.isnan().any() for value in results.values())
    return results


def apply(tensors, *transforms, model=None):
    return put_together(make_pieces(entries_of(tensors), transforms, CONFIG, model), tensors)


def model_of(**shapes):
    return Known(Expected(tuple(shapes), shapes=shapes))


def experts(count=3, rows=2, columns=5):
    return {f"layers.0.experts.{i}.{part}": torch.randn(rows, columns) for i in range(count) for part in ("gate", "up")}


def stacked(tensors, part):
    return torch.stack([value for name, value in tensors.items() if name.endswith(part)])


class TestConcat:
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_w4_in_the_order_of_the_patterns(self, dim):
        shapes = {"k": (4, 2) if dim else (2, 4), "q": (4, 3) if dim else (3, 4), "v": (4, 1) if dim else (1, 4)}
        tensors = {f"a.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        found = apply(tensors, Concat((r"\bq\b", r"\bk\b", r"\bv\b"), "qkv", dim))
        joined = torch.cat([tensors[f"a.{name}.weight"] for name in "qkv"], dim)
        assert torch.equal(found["a.qkv.weight"], joined)

    def test_w4_in_the_order_of_numbers(self):
        tensors = {f"table.shard_{i}.weight": torch.randn(i + 1, 2) for i in (10, 2, 0, 1, *range(3, 10))}
        found = apply(tensors, Concat((r"shard_(?P<index>\d+)\.weight",), "weight"))
        joined = torch.cat([tensors[f"table.shard_{i}.weight"] for i in range(11)])
        assert torch.equal(found["table.weight"], joined)

    def test_w4_of_some_of_the_patterns(self):
        tensors = {"a": torch.randn(2), "c": torch.randn(3)}
        assert torch.equal(apply(tensors, Concat(("a", "b", "c"), "x"))["x"], torch.cat([*tensors.values()]))

    def test_x7_of_stacks(self):
        tensors = experts()
        found = apply(tensors, *PACK)
        joined = torch.cat([stacked(tensors, "gate"), stacked(tensors, "up")], 1)
        assert torch.equal(found["layers.0.experts.gate_up"], joined)

    def test_w4_stack_of_concats(self):
        tensors = experts()
        join = Concat((r"gate$", r"up$"), "both")
        found = apply(tensors, join, Stack(EXPERT + "both", "experts.both"))
        joined = torch.cat([stacked(tensors, "gate"), stacked(tensors, "up")], 1)
        assert torch.equal(found["layers.0.experts.both"], joined)

    def test_w4_of_concats_along_the_same_dimension(self):
        tensors = {name: torch.randn(2, 3) for name in "abc"}
        found = apply(tensors, Concat(("^b$", "^c$"), "bc"), Concat(("^a$", "^bc$"), "abc"))
        assert torch.equal(found["abc"], torch.cat([*tensors.values()]))

    @pytest.mark.parametrize("dims", [(0, 1), (1, 2), (0, 2)])
    def test_x7_transposed(self, dims):
        tensors = experts()
        found = apply(tensors, *PACK, Transpose("gate_up", dims))
        joined = torch.cat([stacked(tensors, "gate"), stacked(tensors, "up")], 1).transpose(*dims)
        assert torch.equal(found["layers.0.experts.gate_up"], joined)

    @pytest.mark.parametrize(("dim", "sizes"), [(0, (1, 2)), (1, (1, 3)), (1, (3, 1)), (2, (4, 1))])
    def test_w4_split_again(self, dim, sizes):
        tensors = experts()
        found = apply(tensors, *PACK, Split("gate_up", ("x", "y"), sizes, dim))
        joined = torch.cat([stacked(tensors, "gate"), stacked(tensors, "up")], 1)
        for name, part in zip("xy", joined.split(sizes, dim), strict=True):
            assert torch.equal(found[f"layers.0.experts.{name}"], part)

    def test_w4_a_dimension_of_its_own_is_reshaped_after_it(self):
        tensors = {name: torch.randn(2, 6) for name in "ab"}
        found = apply(tensors, Concat(("a", "b"), "ab"), Reshape("ab", (3, 2), (1, 0), dim=1))
        joined = torch.cat([*tensors.values()])
        assert torch.equal(found["ab"], joined.view(4, 3, 2).transpose(1, 2).reshape(4, 6))

    @pytest.mark.parametrize(
        ("transforms", "message"),
        [
            ((*PACK, Concat(("gate_up",), "x", dim=2)), "already joined along another dimension"),
            ((Stack(EXPERT + "gate", "g"), Concat(("g$",), "x", dim=0)), "the dimension that a Stack has added"),
            ((*PACK, Reshape("gate_up", (2, -1), (1, 0), dim=1)), "along which a Concat has joined"),
            ((*PACK, Unstack("gate_up", "{index}", dim=1)), "what a Concat has joined"),
            ((*PACK, Reshape("gate_up", (-1,), (0,))), "after a Stack or Concat"),
        ],
    )
    def test_w4_what_cannot_be_said_in_pieces_is_an_error(self, transforms, message):
        with pytest.raises(PluginError, match=message):
            apply(experts(), *transforms)

    def test_w8_parts_that_do_not_fit(self):
        with pytest.raises(WeightsError, match=r"'ab' is joined from tensors that do not fit: \(2, 3\), \(2, 4\)"):
            apply({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, Concat(("a", "b"), "ab"))


class TestUnstack:
    @pytest.mark.parametrize("dim", [0, 1, 2, -1])
    def test_x7_packed_on_disk_and_one_by_one_in_the_model(self, dim):
        packed = torch.randn(3, 4, 5)
        found = apply({"experts.up": packed}, Unstack(r"experts\.up$", "experts.{index}.up.weight", dim))
        assert list(found) == [f"experts.{i}.up.weight" for i in range(packed.shape[dim])]
        for value, expected in zip(found.values(), packed.unbind(dim), strict=True):
            assert torch.equal(value, expected)

    def test_x7_reads_its_own_entry_alone(self):
        pieces = make_pieces(entries_of({"up": torch.zeros(3, 4)}), (Unstack("up", "{index}.up"),), CONFIG)
        assert [piece.index()[0] for piece in pieces] == [(slice(i, i + 1),) for i in range(3)]

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_w4_undoes_a_stack(self, dim):
        tensors = {f"e.{i}.w": torch.randn(2, 3) for i in range(4)}
        found = apply(tensors, Stack(r"e\.(?P<index>\d+)\.w", "e", dim), Unstack("e", "e.{index}.w", dim))
        assert all(torch.equal(found[name], value) for name, value in tensors.items())

    @pytest.mark.parametrize("dim", [1, 2])
    def test_w4_along_another_dimension_than_was_stacked(self, dim):
        tensors = {f"e.{i}.w": torch.randn(2, 3) for i in range(4)}
        found = apply(tensors, Stack(r"e\.(?P<index>\d+)\.w", "e"), Unstack("e", "row.{index}", dim))
        for i, part in enumerate(torch.stack([*tensors.values()]).unbind(dim)):
            assert torch.equal(found[f"row.{i}"], part)


class TestReshapeOfOneDimension:
    @pytest.mark.parametrize("shape", [(12, 5), (12,), (3, 12, 2)])
    def test_w4_rotary_halves(self, shape):
        """The permutation from interleaved rotary pairs to halves, as Transformers does it, for weights and biases."""
        value = torch.randn(shape)
        dim = shape.index(12)
        found = apply({"q": value}, Reshape("q", (2, -1, 2), (0, 2, 1), dim=dim))["q"]
        viewed = value.view(*shape[:dim], 2, 3, 2, *shape[dim + 1 :])
        assert torch.equal(found, viewed.transpose(dim + 1, dim + 2).reshape(shape))

    def test_w4_after_a_stack(self):
        tensors = {f"e.{i}.w": torch.randn(6, 3) for i in range(4)}
        found = apply(tensors, Stack(r"e\.(?P<index>\d+)\.w", "e"), Reshape("e", (-1, 2), (1, 0), dim=1))["e"]
        whole = torch.stack([*tensors.values()])
        assert torch.equal(found, whole.view(4, 3, 2, 3).transpose(1, 2).reshape(4, 6, 3))

    def test_w4_a_size_that_does_not_divide(self):
        with pytest.raises(WeightsError, match="cannot be viewed"):
            apply({"q": torch.zeros(5, 2)}, Reshape("q", (-1, 2), (1, 0), dim=0))


class TestWhatTheModelHas:
    def test_w4_split_as_the_model_is(self):
        value = torch.randn(9, 2)
        model = model_of(**{"a.q": (4, 2), "a.k": (2, 2), "a.v": (3, 2)})
        found = apply({"a.qkv": value}, Split("qkv", ("q", "k", "v"), "model"), model=model)
        for name, part in zip("qkv", value.split([4, 2, 3]), strict=True):
            assert torch.equal(found[f"a.{name}"], part)

    def test_w4_split_into_what_the_model_has_not(self):
        with pytest.raises(WeightsError, match=r"'a\.qkv' is to be split into 'a\.k', which the model does not have"):
            apply({"a.qkv": torch.zeros(4)}, Split("qkv", ("q", "k"), "model"), model=model_of(**{"a.q": (2,)}))
        with pytest.raises(PluginError, match="depends on the model's shapes"):
            apply({"a.qkv": torch.zeros(4)}, Split("qkv", ("q", "k"), "model"))

    def test_w4_equal_parts(self):
        value = torch.randn(6, 2)
        found = apply({"m.gate_up": value}, Split("gate_up", ("gate", "up"), "equal"))
        assert torch.equal(torch.cat([found["m.gate"], found["m.up"]]), value)
        with pytest.raises(WeightsError, match=r"has 5 entries along dimension 0, not \[2, 2\]"):
            apply({"m.gate_up": torch.zeros(5)}, Split("gate_up", ("gate", "up"), "equal"))

    @pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
    def test_w4_transpose_unless_it_fits(self, shape):
        value = torch.randn(shape)
        found = apply({"w": value}, Transpose("w", unless_fits=True), model=model_of(w=(3, 2)))["w"]
        assert torch.equal(found, value if shape == (3, 2) else value.T)

    def test_w4_ignored_unless_the_model_has_it(self):
        rule = Ignore("bias", "a rule", unless_known=True)
        made = make_pieces(entries_of({"a.bias": torch.zeros(1), "b.bias": torch.zeros(1)}), (rule,), CONFIG,
                           model_of(**{"b.bias": (1,)}))  # fmt: skip
        assert {piece.name: piece.rule for piece in made} == {"a.bias": "a rule", "b.bias": None}


class TestChains:
    def test_w4_a_tensor_goes_through_one_chain(self):
        first = Chain(("a",), (Rename("a", "b"),))
        second = Chain(("b",), (Rename("b", "c"),))
        found = apply({"a": torch.zeros(1), "x.b": torch.zeros(1), "z": torch.zeros(1)}, FirstOf((first, second)))
        assert set(found) == {"b", "x.c", "z"}

    def test_w4_steps_see_the_tensors_of_the_chain_alone(self):
        tensors = {"l.qkv": torch.randn(4, 2), "other.q": torch.randn(4, 2)}
        chain = Chain((r"qkv",), (Split("qkv", ("q", "k"), "equal"), Transpose("q$")))
        found = apply(tensors, chain)
        assert torch.equal(found["l.q"], tensors["l.qkv"][:2].T)
        assert torch.equal(found["other.q"], tensors["other.q"])

    def test_w4_within_a_submodel(self):
        names = ("model.text.norm.w", "text.norm.w", "model.vision.norm.w", "norm.w")
        chain = Chain((r"^norm\.",), (Rename(r"^norm\.", "final."),), within=r"(?:model\.)?text\.")
        found = apply({name: torch.zeros(1) for name in names}, chain)
        assert set(found) == {"model.text.final.w", "text.final.w", "model.vision.norm.w", "norm.w"}

    def test_w4_within_asks_the_model_for_whole_names(self):
        chain = Chain(("qkv",), (Split("qkv", ("q", "k"), "model"),), within=r"text\.")
        model = model_of(**{"text.q": (3,), "text.k": (1,), "q": (2,), "k": (2,)})
        found = apply({"text.qkv": torch.arange(4.0)}, chain, model=model)
        assert {name: value.tolist() for name, value in found.items()} == {"text.q": [0, 1, 2], "text.k": [3]}

    def test_w4_groups_of_two_submodels_stay_apart(self):
        tensors = {f"{side}.e.{i}": torch.full((1,), float(i)) for side in ("a", "b") for i in range(2)}
        found = apply(tensors, Chain(("e",), (Stack(r"^e\.(?P<index>\d+)", "e"),), within=r"[ab]\."))
        assert {name: value.flatten().tolist() for name, value in found.items()} == {"a.e": [0, 1], "b.e": [0, 1]}

    def test_w4_rename_once(self):
        assert set(apply({"a.a.a": torch.zeros(1)}, Rename("a", "b", 1))) == {"b.a.a"}

    def test_w4_a_pattern_in_a_chain_that_is_none(self):
        with pytest.raises(PluginError, match="not a regular expression"):
            apply({"a": torch.zeros(1)}, Chain(("(",), ()))


class TestSeveralLayouts:
    """One list of transforms for a checkpoint in the authors' layout and one that is already in the model's."""

    RULES = (*PACK, Rename(r"\.router\.", ".gate."))

    def adapt(self, tensors, *names):
        pieces = make_pieces(entries_of(tensors), (), CONFIG)
        known = Known(Expected(names))
        return put_together(adapt_pieces(pieces, self.RULES, CONFIG, known), tensors)

    def test_w4_the_layout_that_the_transforms_are_for(self):
        found = self.adapt(
            experts() | {"layers.0.router.w": torch.zeros(1)}, "layers.0.experts.gate_up", "layers.0.gate.w"
        )
        assert set(found) == {"layers.0.experts.gate_up", "layers.0.gate.w"}

    def test_w4_what_the_model_has_already_is_left_alone(self):
        tensors = {"layers.0.experts.gate_up": torch.randn(2, 2), "layers.0.router.w": torch.zeros(1)}
        assert set(self.adapt(tensors, *tensors)) == set(tensors)

    def test_w4_also_where_names_lack_the_prefix(self):
        tensors = {"layers.0.router.w": torch.zeros(1)}
        assert set(self.adapt(tensors, "model.layers.0.router.w")) == set(tensors)

    def test_w4_a_name_that_both_are_is_transformed(self):
        tensors = {"layers.0.router.w": torch.zeros(1)}
        assert set(self.adapt(tensors, "layers.0.router.w", "layers.0.gate.w")) == {"layers.0.gate.w"}


class TestMatching:
    def match(self, disk, names, **kwargs):
        pieces = [item if isinstance(item, Piece) else Piece(item, item, (2,)) for item in disk]
        return match_names(pieces, Expected(tuple(names), **kwargs))

    @pytest.mark.parametrize("disk", ["h.w", "transformer.h.w", "model.h.w", "model.transformer.h.w"])
    @pytest.mark.parametrize("name", ["h.w", "transformer.h.w"])
    def test_w4_a_base_prefix_absent_or_extra(self, disk, name):
        if disk.startswith("model.t") and name == "h.w":
            return  # two prefixes at once
        assert self.match([disk], [name], prefixes=("model.", "transformer.")).loaded[0].name == name

    def test_w4_a_base_prefix_for_another(self):
        found = self.match(["transformer.h.w"], ["model.h.w"], prefixes=("model.", "transformer."))
        assert found.loaded[0].name == "model.h.w"

    def test_w4_another_model_s_prefix_is_unknown(self):
        with pytest.raises(WeightsError, match=r"does not have: bert\.h\.w"):
            self.match(["bert.h.w", "h.w"], ["h.w"], prefixes=("model.", "transformer."))

    def test_w2_packed_and_one_by_one_in_one_checkpoint(self):
        tensors = experts() | {"layers.0.experts.gate_up": torch.zeros(3, 4, 5)}
        made = make_pieces(entries_of(tensors), PACK, CONFIG)
        with pytest.raises(WeightsError, match=r"two tensors fill 'layers\.0\.experts\.gate_up'"):
            self.match(made, ["layers.0.experts.gate_up"])

    def test_w4_a_part_of_a_parameter_is_not_enough(self):
        """Each name counts in full: half of the slots of a stack is an error even if the name is there."""
        tensors = {f"e.{i}": torch.zeros(2) for i in range(4)}
        stack = Stack(r"e\.(?P<index>\d+)", "e")
        made = [piece for piece in make_pieces(entries_of(tensors), (stack,), CONFIG) if piece.source != "e.1"]
        with pytest.raises(WeightsError, match=r"only a part of 'e' is on disk: 6 of 8 values"):
            self.match(made, ["e"])

    def test_w4_a_buffer_that_may_be_absent(self):
        assert self.match(["a"], ["a", "b"], optional=("b",)).missing == ["b"]
        with pytest.raises(WeightsError, match="no tensor for 1 of its parameters: a"):
            self.match([], ["a", "b"], optional=("b",))

    def test_w5_a_joined_embedding_stands_in_as_a_whole(self):
        tensors = {"head.a": torch.zeros(2, 3), "head.b": torch.zeros(1, 3)}
        made = make_pieces(entries_of(tensors), (Concat((r"a$", r"b$"), "weight"),), CONFIG)
        found = self.match(made, ["embed"], tied={"head.weight": "embed"})
        assert [piece.source for piece in found.loaded] == ["head.a", "head.b"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_w4_any_order_of_joins_turns_and_cuts(data):
    """Random pipelines over stacked experts, each step against torch on whole tensors."""
    tensors = {f"e.{i}.w": torch.randn(4, 6) for i in range(2)}
    dim = data.draw(st.integers(0, 2))
    transforms = [Stack(r"e\.(?P<index>\d+)\.w", "w", dim)]
    whole = torch.stack([*tensors.values()], dim)
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["transpose", "reshape", "half", "row"]))
        axis = data.draw(st.integers(0, whole.ndim - 1))
        if kind == "transpose":
            other = data.draw(st.integers(0, whole.ndim - 1))
            transforms.append(Transpose("w", (axis, other)))
            whole = whole.transpose(axis, other)
        elif kind == "half" and whole.shape[axis] > 1:
            size = data.draw(st.integers(1, whole.shape[axis] - 1))
            names = ("w", "dropped") if data.draw(st.booleans()) else ("dropped", "w")
            sizes = (size, whole.shape[axis] - size)
            transforms += [Split("^w", names, sizes, axis), Ignore("dropped", "cut off")]
            whole = whole.split(sizes, axis)[names.index("w")]
        elif kind == "row" and whole.ndim > 2:
            index = data.draw(st.integers(0, whole.shape[axis] - 1))
            transforms += [
                Unstack("^w", "w.{index}", axis),
                Rename(rf"^w\.{index}$", "w"),
                Ignore(r"^w\.", "another row"),
            ]
            whole = whole.select(axis, index)
        elif kind == "reshape" and whole.shape[axis] % 2 == 0 and axis != _stacked(tensors, transforms):
            transforms.append(Reshape("^w", (-1, 2), (1, 0), axis))
            view = (*whole.shape[:axis], whole.shape[axis] // 2, 2, *whole.shape[axis + 1 :])
            whole = whole.reshape(view).transpose(axis, axis + 1).reshape(whole.shape)
    assert torch.equal(apply(tensors, *transforms)["w"], whole)


def _stacked(tensors, transforms):
    """The dimension that is a stack's, if there is one still."""
    pieces = make_pieces(entries_of(tensors), transforms, CONFIG)
    return next((piece.slot.dim for piece in pieces if piece.rule is None and piece.slot), None)
