"""Reading tensors: every quantisation against the `gguf` package, slices, shards, memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from modelbay.errors import WeightsError
from modelbay_gguf.header import BLOCK_TYPES
from modelbay_gguf.weights import Gguf, GgufSource

ROWS, COLUMNS = 700, 512  # more rows than one chunk holds

WRITTEN_BY_PACKAGE = (Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)


def _write(path: Path, tensors: dict[str, tuple[np.ndarray, Q]], arch: str = "llama", **metadata: int) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        (writer.add_uint16 if key == "split.count" else writer.add_int32)(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=None if kind in (Q.F32, Q.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(kind: Q, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Random bytes are valid blocks of any type; scales may be inf or nan, which must come through as well."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(int(kind)).integers(0, 256, (rows, columns // elements * size), dtype=np.uint8)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_every_block_type_is_what_the_gguf_package_gives(kind: Q, tmp_path: Path) -> None:
    blocks = _random_blocks(kind)
    path = _write(tmp_path / "t.gguf", {"t": (blocks, kind)})
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    with GgufSource({path.name: path}) as source:
        entry = source.entries()["t"]
        assert (entry.shape, entry.dtype, entry.nbytes) == ((ROWS, COLUMNS), "float32", blocks.nbytes)
        found = source.read("t")
    assert found.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # bit for bit, nan included


@pytest.mark.parametrize(
    "kind", [kind for kind in BLOCK_TYPES if kind.name not in ("Q5_0", "Q5_1")], ids=lambda k: k.name
)
def test_every_block_type_is_what_transformers_gives(kind: Q, tmp_path: Path) -> None:
    """A second opinion, in torch. It has no Q5_0 and Q5_1, and need not agree on nan."""
    from transformers.integrations.gguf.dequant import dequantize

    blocks = _random_blocks(kind, rows=64)
    path = _write(tmp_path / "t.gguf", {"t": (blocks, kind)})
    with GgufSource({path.name: path}) as source:
        found = source.read("t")
    expected = dequantize(torch.from_numpy(blocks).reshape(-1), int(kind)).view(found.shape)
    finite = found.isfinite() & expected.isfinite()
    assert finite.float().mean() > 0.5
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", WRITTEN_BY_PACKAGE, ids=lambda kind: kind.name)
def test_values_survive_the_round_trip(kind: Q, tmp_path: Path) -> None:
    """Against the values that were quantised: a wrong block layout would not be within half a step."""
    values = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    stored = values.astype(np.float16) if kind == Q.F16 else gguf.quantize(values, kind)
    path = _write(tmp_path / "t.gguf", {"t": (stored, kind)})
    with GgufSource({path.name: path}) as source:
        found = source.read("t").float().clone()
    bits = {Q.F32: 24, Q.F16: 11, Q.BF16: 8}.get(kind) or int(kind.name[1])
    assert np.abs(found.numpy() - values).max() <= np.abs(values).max() * 2.0 ** (1 - bits)


@pytest.mark.parametrize(("kind", "dtype"), [(Q.F32, torch.float32), (Q.F16, torch.float16), (Q.BF16, torch.bfloat16)])
def test_plain_types_come_as_they_are_and_uncopied(kind: Q, dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = values.view(torch.uint8).numpy() if kind == Q.BF16 else values.numpy()
    path = _write(tmp_path / "t.gguf", {"t": (raw, kind)})
    with GgufSource({path.name: path}) as source:
        assert source.entries()["t"].dtype == str(dtype).removeprefix("torch.")
        first, second = source.read("t"), source.read("t")
        assert torch.equal(first, values)
        assert first.data_ptr() == second.data_ptr()
        first.zero_()  # private pages: the file is never written
        del first, second
    with GgufSource({path.name: path}) as source:
        assert torch.equal(source.read("t"), values)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q6_K, Q.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "index",
    [
        (slice(3, 500),),
        (slice(None), slice(100, 300)),
        (slice(690, 2000), slice(0, 1)),
        (slice(5, 5),),
        (slice(-2, None), slice(-7, None)),
    ],
    ids=str,
)
def test_w7_a_slice_is_the_slice_of_the_whole(kind: Q, index: tuple[slice, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float16)
    stored = values if kind == Q.F16 else _random_blocks(kind)
    path = _write(tmp_path / "t.gguf", {"t": (stored, kind)})
    with GgufSource({path.name: path}) as source:
        whole, part = source.read("t")[index], source.read("t", index)
        assert part.shape == whole.shape
        torch.testing.assert_close(part, whole, rtol=0, atol=0, equal_nan=True)


def test_one_and_three_dimensions(tmp_path: Path) -> None:
    line = _random_blocks(Q.Q8_0, rows=1)[0]
    experts = _random_blocks(Q.Q4_0, rows=12).reshape(3, 4, -1)
    path = _write(tmp_path / "t.gguf", {"line": (line, Q.Q8_0), "experts": (experts, Q.Q4_0)})
    with np.errstate(all="ignore"), GgufSource({path.name: path}) as source:
        for name, blocks, kind in (("line", line, Q.Q8_0), ("experts", experts, Q.Q4_0)):
            expected = torch.from_numpy(gguf.dequantize(blocks, kind))
            torch.testing.assert_close(source.read(name), expected, rtol=0, atol=0, equal_nan=True)
        part = source.read("experts", (slice(1, 2), slice(2, 4), slice(32, 64)))
        expected = torch.from_numpy(gguf.dequantize(experts, Q.Q4_0))[1:2, 2:4, 32:64]
        torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


def test_w7_dequantising_takes_little_more_than_its_result(tmp_path: Path) -> None:
    blocks = _random_blocks(Q.Q4_K, rows=8192)
    path = _write(tmp_path / "t.gguf", {"t": (blocks, Q.Q4_K)})
    with GgufSource({path.name: path}) as source:
        source.read("t", (slice(0, 1),))
        tracemalloc.start()
        size = source.read("t").nbytes
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert size < peak < 1.15 * size


def test_w7_released_tensors_can_be_read_again(tmp_path: Path) -> None:
    blocks = {str(number): (_random_blocks(Q.Q8_0, rows=number + 1), Q.Q8_0) for number in range(5)}
    path = _write(tmp_path / "t.gguf", blocks)
    with GgufSource({path.name: path}) as source:
        first = {name: source.read(name) for name in blocks}
        for name in blocks:
            source.release(name)
        for name in blocks:
            torch.testing.assert_close(source.read(name), first[name], rtol=0, atol=0, equal_nan=True)


def test_closing_while_a_view_is_alive_is_safe(tmp_path: Path) -> None:
    values = np.arange(32, dtype=np.float32)
    path = _write(tmp_path / "t.gguf", {"t": (values, Q.F32)})
    with GgufSource({path.name: path}) as source:
        view = source.read("t")
    assert torch.equal(view, torch.from_numpy(values))


def _shards(tmp_path: Path, count: int = 3) -> list[Path]:
    return [
        _write(
            tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf",
            {f"t{number}": (np.full((2, 32), number, np.float32), Q.F32)},
            **{"split.no": number, "split.count": count, "split.tensors.count": count},
        )
        for number in range(count)
    ]


def test_w2_all_shards_of_a_split_model_are_read(tmp_path: Path, files_of: Callable[[Path], Any]) -> None:
    paths = _shards(tmp_path)
    files = files_of(paths[1])  # any shard may be named
    assert Gguf().select(files) == tuple(path.name for path in paths)
    with Gguf().open(files, None, None) as source:  # type: ignore[arg-type]
        assert {name: entry.file for name, entry in source.entries().items()} == {
            f"t{number}": path.name for number, path in enumerate(paths)
        }
        assert [source.read(f"t{number}")[0, 0].item() for number in range(3)] == [0, 1, 2]


def test_w2_an_absent_shard_is_named_before_anything_is_read(tmp_path: Path, files_of: Callable[[Path], Any]) -> None:
    paths = _shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(WeightsError, match=r"m-00002-of-00003\.gguf"):
        Gguf().select(files_of(paths[0]))


def test_w2_a_shard_that_was_renamed_is_not_taken_for_the_whole(
    tmp_path: Path, files_of: Callable[[Path], Any]
) -> None:
    renamed = _shards(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(WeightsError, match="one of 3 shards"):
        Gguf().open(files_of(renamed), None, None)  # type: ignore[arg-type]


def test_w2_the_same_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    paths = {name: _write(tmp_path / name, {"t": (np.zeros(32, np.float32), Q.F32)}) for name in ("a.gguf", "b.gguf")}
    with pytest.raises(WeightsError, match=r"t stands in b\.gguf and in a\.gguf"):
        GgufSource(paths)


def test_w1_one_model_in_a_directory_is_found_and_two_are_a_question(
    tmp_path: Path, files_of: Callable[..., Any]
) -> None:
    assert Gguf().select(files_of(tmp_path)) == ()
    for name in ("mmproj-model.gguf", "model.Q4_0.gguf"):
        (tmp_path / name).touch()
    assert Gguf().select(files_of(tmp_path)) == ("model.Q4_0.gguf",)
    (tmp_path / "model.Q8_0.gguf").touch()
    with pytest.raises(WeightsError, match=r"2 GGUF models: model\.Q4_0\.gguf, model\.Q8_0\.gguf"):
        Gguf().select(files_of(tmp_path))
