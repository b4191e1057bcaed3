"""W3: a safetensors header is believed only after it has been checked; the reference implementation is the judge."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from modelbay.errors import WeightsError
from modelbay.weights.header import DTYPES, MAX_HEADER_BYTES, read_header

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = save({"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0, 5)})


def file_of(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ONE_BYTE = json.dumps(entry("U8", (1,), (0, 1))).encode()


def reference_accepts(path):
    try:
        with safe_open(str(path), "pt") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError):
        return None


def ours_accepts(path):
    try:
        return {item.name for item in read_header(path)}
    except WeightsError:
        return None


def repeats_a_name(path):
    """Whether the header is JSON with a name that is there twice."""
    content = path.read_bytes()
    try:
        pairs = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]], object_pairs_hook=list)
        names = [name for name, _ in pairs]
    except (ValueError, TypeError, struct.error):
        return False
    return len(set(names)) < len(names)


def test_w3_reads_what_the_reference_writes(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    found = {item.name: item for item in read_header(path)}
    assert {name: (item.dtype, item.shape) for name, item in found.items()} == {
        "a": ("bfloat16", (4,)),
        "b": ("float32", (2, 3)),
        "c": ("float32", (0, 5)),
    }
    assert max(item.end for item in found.values()) == len(GOOD)
    begins = [item.begin for item in read_header(path)]
    assert begins == sorted(begins)


def test_w3_every_dtype_name_is_one_of_torch_with_that_size():
    for name, size in DTYPES.values():
        assert getattr(torch, name).itemsize == size


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "empty"),
        (b"abc", "too short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 9\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>not found</html>", "web page"),
        (bytes(4096), "zeros"),
        (GOOD[:20], "truncated"),
        (GOOD[:-1], "truncated"),
        (GOOD + b"x", "1 bytes that belong to no tensor"),
        (file_of({}, length=MAX_HEADER_BYTES + 1), "limit"),
        (file_of(b"[1, 2]"), "not a JSON object"),
        (file_of(b"{" * 3), "not valid JSON"),
        (file_of(b'{"a":' + b"[" * 200_000), "not valid JSON"),
        (file_of(b'{"a": "\xff"}'), "not valid JSON"),
        (file_of(b'{"a": ' + b"9" * 6000 + b"}"), "not valid JSON"),
        (file_of({"a": 3}), "does not consist of"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
        (file_of({"a": entry(dtype="F31")}, bytes(8)), "not supported"),
        (file_of({"a": entry(dtype=["F32"])}, bytes(8)), "not supported"),
        (file_of({"a": entry(shape=(-1,))}, bytes(8)), "shape"),
        (file_of({"a": entry(shape=(True, 2))}, bytes(8)), "shape"),
        (file_of({"a": entry(shape=(1,) * 65, offsets=(0, 4))}, bytes(4)), "shape"),
        (file_of({"a": entry(shape=(3,))}, bytes(8)), "does not fill"),
        (file_of({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8)), "does not fill"),
        (file_of({"a": entry(offsets=(8, 0))}, bytes(8)), "data_offsets"),
        (file_of({"a": entry(), "b": entry()}, bytes(8)), "overlaps"),
        (file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlaps"),
        (file_of({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "gap"),
        (file_of({"a": entry(offsets=(4, 12))}, bytes(12)), "gap"),
        (file_of(b'{"a": %b, "a": %b}' % (ONE_BYTE, ONE_BYTE), b"x"), "twice"),
    ],
)  # fmt: skip
def test_w3_names_the_file_and_the_likely_cause(tmp_path, content, cause):
    path = tmp_path / "model-00001.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=cause) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_w3_absent_file_is_a_weights_error(tmp_path):
    with pytest.raises(WeightsError, match="No such file"):
        read_header(tmp_path / "none.safetensors")


@QUICK
@example(position=GOOD.index(b'"a"') + 1, bit=1, cut=0)  # it is called "c" then, as another one is
@given(position=st.integers(0, len(GOOD) - 1), bit=st.integers(0, 7), cut=st.integers(0, 40))
def test_w3_flipped_bits_and_cuts_are_judged_as_by_the_reference(tmp_path, position, bit, cut):
    content = bytearray(GOOD)
    content[position] ^= 1 << bit
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(content[: len(content) - cut]))
    # Of a name that is there twice the reference passes over the first tensor without a word; that is refused.
    assert ours_accepts(path) == (None if repeats_a_name(path) else reference_accepts(path))


TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F64", "X"]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 1 << 40]), max_size=3),
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2),
    }
)


@QUICK
@given(tensors=st.dictionaries(st.sampled_from("abc"), TENSOR, max_size=3), size=st.integers(0, 32))
def test_w3_lying_ranges_are_judged_as_by_the_reference(tmp_path, tensors, size):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(tensors, bytes(size)))
    assert ours_accepts(path) == reference_accepts(path)


@QUICK
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    shift=st.integers(-2, 2),
    victim=st.integers(0, 3),
    extra=st.integers(-2, 2),
)
def test_w3_nearly_right_ranges_are_judged_as_by_the_reference(tmp_path, sizes, shift, victim, extra):
    """Consecutive ranges with one of them moved: overlaps, gaps, and files that are a little short or long."""
    header, start = {}, 0
    for number, size in enumerate(sizes):
        moved = start + (shift if number == victim else 0)
        header[f"t{number}"] = entry("U8", (size,), (max(moved, 0), max(moved, 0) + size))
        start += size
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(header, bytes(max(start + extra, 0))))
    assert ours_accepts(path) == reference_accepts(path)


@QUICK
@given(length=st.integers(0, (1 << 64) - 1), tail=st.binary(max_size=64))
def test_w3_claimed_lengths_never_cost_memory(tmp_path, length, tail):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + tail)
    assert ours_accepts(path) == reference_accepts(path)
