"""A large or hostile checkpoint may cost an error, never endless time, memory, or a crash (W2, W3)."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelbay.errors import ConfigError, WeightsError
from modelbay.source import ModelFiles
from modelbay.weights.formats import TensorEntry
from modelbay.weights.index import check_index, select_files, weight_map
from modelbay.weights.matching import Expected, match_names
from modelbay.weights.names import make_pieces
from modelbay.weights.pieces import Piece
from modelbay.weights.safetensors import NAMES
from modelbay.weights.transforms import Stack

MILLION = 1_000_000
CPU_SECONDS, MEMORY = 120, 3 * 2**30
INDEXES = NAMES.indexes
OUTSIDE = ["../w.safetensors", "/etc/passwd", "a/../../b", "..", "C:\\x", "a\0b"]

#: Runs in a process of its own, in bounds: what takes the square of a million never ends there.
BOUNDED = """
import sys
from pathlib import Path
from modelbay.errors import ModelbayError, WeightsError
from modelbay.source import ModelFiles
from modelbay.weights.header import read_header
from modelbay.weights.index import check_index, select_files
from modelbay.weights.matching import Expected, match_names
from modelbay.weights.pieces import Piece
from modelbay.weights.safetensors import NAMES

what, root = sys.argv[1], Path(sys.argv[2])
names = tuple(path.name for path in root.iterdir())
files = ModelFiles(str(root), "local", root, names)
try:
    if what == "index":
        print(len(select_files(files, NAMES)))
        check_index(files, NAMES.indexes, {})
    elif what == "header":
        print(len(read_header(root / "model.safetensors")))
    else:
        match_names((Piece(f"x{i}", f"x{i}", (1,)) for i in range(1_000_000)), Expected(("y",)))
except WeightsError as error:
    print(len(str(error)), str(error))
"""


def bounded(what: str, root: Path) -> str:
    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    command = [sys.executable, "-c", BOUNDED, what, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limits, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def files_of(root: Path) -> ModelFiles:
    return ModelFiles(str(root), "local", root, tuple(path.name for path in root.iterdir()))


def write_index(root: Path, content: object) -> ModelFiles:
    (root / INDEXES[0]).write_text(content if isinstance(content, str) else json.dumps(content))
    return files_of(root)


def header_file(path: Path, raw: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def many_entries(last: str) -> bytes:
    """A million tensors without data, then one more of this name."""
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = [f'"t{i}":{entry}' for i in range(MILLION)]
    return ("{" + ",".join([*names, f'"{last}":{entry}']) + "}").encode()


@pytest.mark.deep
def test_w2_an_index_of_a_million_tensors_is_read_and_what_is_wrong_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"")
    write_index(tmp_path, {"weight_map": {f"model.layers.{i}.weight": "w.safetensors" for i in range(MILLION)}})
    selected, said = bounded("index", tmp_path).splitlines()
    assert selected == "1"
    assert int(said.split()[0]) < 1000
    assert "and 999992 more" in said


@pytest.mark.deep
def test_w2_an_index_that_names_a_million_absent_files(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {f"t{i}": f"w{i}.safetensors" for i in range(MILLION)}})
    said = bounded("index", tmp_path)
    assert int(said.split()[0]) < 1000
    assert "names files that are not there" in said


@pytest.mark.deep
@pytest.mark.parametrize(("last", "said"), [("t1000000", "1000001"), ("t7", "has the key 't7' twice")])
def test_w3_a_header_of_a_million_tensors(tmp_path: Path, last: str, said: str) -> None:
    header_file(tmp_path / "model.safetensors", many_entries(last), b"")
    assert said in bounded("header", tmp_path)


@pytest.mark.deep
def test_w4_a_million_names_that_the_model_does_not_have(tmp_path: Path) -> None:
    said = bounded("names", tmp_path)
    assert int(said.split()[0]) < 2000
    assert "1000000 tensors that the model does not have" in said


def test_an_endless_name_does_not_make_an_endless_message() -> None:
    name = "x" * 1_000_000
    with pytest.raises(WeightsError) as caught:
        match_names([Piece(name, name, (1,))], Expected(("y",)))
    assert len(str(caught.value)) < 1000


def test_a_number_of_thousands_of_digits_is_a_name_and_no_crash() -> None:
    """Python refuses to read such a number, with an error that is not ours."""
    name = f"model.layers.{'9' * 5000}.weight"
    with pytest.raises(WeightsError, match="the model does not have"):
        match_names([Piece(name, name, (1,))], Expected(("model.layers.0.weight",), num_layers=1))
    stack = Stack(r"experts\.(?P<index>\d+)\.w", "experts.w")
    entry = TensorEntry(f"experts.{'9' * 5000}.w", (2,), "float32", "f", 8)
    with pytest.raises(WeightsError, match="number of 5000 digits"):
        make_pieces({entry.name: entry}, (stack,), None)  # type: ignore[arg-type]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(content=json_values | st.dictionaries(st.just("weight_map"), json_values))
def test_w2_any_json_as_an_index_is_a_mapping_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, content: object
) -> None:
    files = write_index(tmp_path_factory.mktemp("index", numbered=True), content)
    try:
        mapping = weight_map(files, INDEXES[0])
    except (WeightsError, ConfigError):
        return
    assert mapping
    assert all(isinstance(name, str) and isinstance(file, str) for name, file in mapping.items())


@settings(max_examples=200, deadline=None)
@given(
    name=st.text(max_size=30) | st.sampled_from(["../w.safetensors", "/etc/passwd", "a/../../b", "..", "C:\\x", "a\0b"])
)
def test_w2_no_name_in_an_index_leads_out_of_the_model(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("model", numbered=True)
    root = folder / "model"
    root.mkdir()
    (root / "w.safetensors").write_bytes(b"")
    files = write_index(root, {"weight_map": {"t": name}})
    try:
        [selected] = select_files(files, NAMES)
        check_index(files, INDEXES, {"t": selected})
    except WeightsError:
        return
    assert selected in files.names


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_w2_flipped_bytes_in_an_index_end_in_our_error_or_in_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("flip", numbered=True)
    (root / "w.safetensors").write_bytes(b"")
    raw = bytearray(json.dumps({"metadata": {"total_size": 8}, "weight_map": {"t": "w.safetensors"}}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (root / INDEXES[0]).write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        selected = select_files(files_of(root), NAMES)
    except (WeightsError, ConfigError):
        return
    assert set(selected) <= {"w.safetensors", *files_of(root).names}
