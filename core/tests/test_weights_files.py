"""W1-W3: which files are read, and the two file formats of the core."""

import json
import pickle
import pkgutil
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors.torch import save_file

import modelbay.weights
from modelbay.args import EngineArgs
from modelbay.errors import WeightsError
from modelbay.plugins import load_plugins
from modelbay.source import ModelFiles
from modelbay.trace import Trace
from modelbay.weights.choose import choose_format
from modelbay.weights.pt import PyTorchBin
from modelbay.weights.safetensors import Safetensors

ARGS = EngineArgs.create("m")


def files_of(root, entry=None):
    names = tuple(sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()))
    return ModelFiles(str(root), "local", root, names, entry=entry)


def opened(format, root):
    return format().open(files_of(root), None, ARGS)


def index(root, name, mapping):
    (root / name).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))


def shards(root, count=2):
    """model-1.safetensors … each with the tensor t<number>."""
    for number in range(1, count + 1):
        save_file({f"t{number}": torch.full((3,), float(number))}, root / f"model-{number}.safetensors")


def test_no_module_of_the_package_imports_torch():
    names = [item.name for item in pkgutil.iter_modules(modelbay.weights.__path__, "modelbay.weights.")]
    assert "modelbay.weights.pt" in names
    script = f"import sys, {', '.join(names)}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


class TestSelection:
    def test_w2_the_index_decides(self, tmp_path):
        shards(tmp_path, 3)
        index(tmp_path, "model.safetensors.index.json", {"t1": "model-1.safetensors", "t3": "model-3.safetensors"})
        assert Safetensors().select(files_of(tmp_path)) == ("model-1.safetensors", "model-3.safetensors")

    def test_w2_a_file_that_the_index_names_and_is_absent(self, tmp_path):
        """Case 29."""
        shards(tmp_path, 1)
        index(tmp_path, "model.safetensors.index.json", {"t1": "model-1.safetensors", "t2": "model-2.safetensors"})
        with pytest.raises(WeightsError, match=r"not there: model-2\.safetensors"):
            Safetensors().select(files_of(tmp_path))

    def test_w2_a_tensor_that_the_index_promises_and_no_file_holds(self, tmp_path):
        shards(tmp_path, 2)
        index(tmp_path, "model.safetensors.index.json", {"t1": "model-1.safetensors", "t9": "model-2.safetensors"})
        with pytest.raises(WeightsError, match="promises tensors that its files do not hold: t9"):
            opened(Safetensors, tmp_path)

    @pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors"])
    def test_w2_an_index_cannot_point_outside_the_model(self, tmp_path, name):
        index(tmp_path, "model.safetensors.index.json", {"t1": name})
        with pytest.raises(WeightsError, match="outside the model"):
            Safetensors().select(files_of(tmp_path))

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}'])
    def test_w2_a_malformed_index(self, tmp_path, content):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(WeightsError, match="no weight_map"):
            Safetensors().select(files_of(tmp_path))

    def test_w2_without_index_all_shards_of_the_root_and_no_copies(self, tmp_path):
        shards(tmp_path, 2)
        (tmp_path / "original").mkdir()
        save_file({"x": torch.ones(1)}, tmp_path / "original" / "model.safetensors")
        for name in ("consolidated", "consolidated.00", "adapter_model"):
            save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
        assert Safetensors().select(files_of(tmp_path)) == ("model-1.safetensors", "model-2.safetensors")

    def test_w2_the_same_tensor_twice_names_both_files(self, tmp_path):
        shards(tmp_path, 1)
        save_file({"t1": torch.ones(3)}, tmp_path / "model-2.safetensors")
        with pytest.raises(WeightsError, match=r"'t1' is in both model-1\.safetensors and model-2\.safetensors"):
            opened(Safetensors, tmp_path)

    def test_w2_bin_files_without_trainer_state(self, tmp_path):
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt"):
            torch.save({"x": torch.ones(1)}, tmp_path / name)
        assert PyTorchBin().select(files_of(tmp_path)) == ("pytorch_model.bin",)

    @pytest.mark.parametrize(
        ("names", "chosen"),
        [
            (("model.fp16", "model", "model.non_ema"), ("model",)),
            (
                ("model-00001-of-00002", "model-00002-of-00002", "model.fp16-00001-of-00002", "model-00001-of-00002.x"),
                ("model-00001-of-00002", "model-00002-of-00002"),
            ),
            (("model.fp16",), ("model.fp16",)),
            (("a", "b"), ("a", "b")),
            (("model", "model-00001-of-00001"), ("model-00001-of-00001", "model")),
        ],
        ids=["variant", "variants of shards", "variant alone", "no standard name", "two of the standard names"],
    )
    def test_w2_standard_names_come_before_what_lies_beside_them(self, tmp_path, names, chosen):
        for name in names:
            save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
            torch.save({"x": torch.ones(1)}, tmp_path / f"{name.replace('model', 'pytorch_model', 1)}.bin")
        assert Safetensors().select(files_of(tmp_path)) == tuple(f"{name}.safetensors" for name in chosen)
        assert PyTorchBin().select(files_of(tmp_path)) == tuple(
            f"{name.replace('model', 'pytorch_model', 1)}.bin" for name in chosen
        )

    @pytest.mark.parametrize("suffix", ["pt", "pth", "bin"])
    @pytest.mark.parametrize("main", ["model", "weights"])
    def test_w2_what_a_trainer_goes_on_from_is_no_weights(self, tmp_path, suffix, main):
        trained = "trainer_state training_state training_args optimizer optim optimizer_0 optim_states lr_scheduler "
        trained += "scheduler scaler grad_scaler sampler rng_state_1 recipe_state train_state "
        trained += "bf16_zero_pp_rank_0_mp_rank_00_optim_states"
        for name in (main, *trained.split()):
            torch.save({"x": 1} if name != main else {"x": torch.ones(1)}, tmp_path / f"{name}.{suffix}")
        assert PyTorchBin().select(files_of(tmp_path)) == (f"{main}.{suffix}",)
        with opened(PyTorchBin, tmp_path) as source:
            assert list(source.entries()) == ["x"]

    @pytest.mark.parametrize("name", ["optimized_model", "optimus", "training_model"])
    def test_w2_names_that_only_look_like_a_trainers(self, tmp_path, name):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
        assert Safetensors().select(files_of(tmp_path)) == (f"{name}.safetensors",)

    def test_w2_a_single_file_reference(self, tmp_path):
        shards(tmp_path, 2)
        assert Safetensors().select(files_of(tmp_path, "model-2.safetensors")) == ("model-2.safetensors",)
        assert PyTorchBin().select(files_of(tmp_path, "model-2.safetensors")) == ()


class TestChoice:
    def choose(self, root, name="auto"):
        trace = Trace()
        return choose_format(name, files_of(root), load_plugins([]), trace)[0].name, trace

    def test_w1_auto_prefers_safetensors(self, tmp_path):
        shards(tmp_path, 1)
        torch.save({"t1": torch.ones(3)}, tmp_path / "pytorch_model.bin")
        name, trace = self.choose(tmp_path)
        assert name == "safetensors"
        assert trace.find("load format", "weights").answer == "safetensors"

    def test_w1_auto_takes_bin_and_says_what_was_not_there(self, tmp_path):
        torch.save({"t1": torch.ones(3)}, tmp_path / "pytorch_model.bin")
        name, trace = self.choose(tmp_path)
        assert name == "pt"
        assert "safetensors" in [item.option for item in trace.find("load format").rejected]

    def test_w1_explicit_safetensors_never_falls_back(self, tmp_path):
        torch.save({"t1": torch.ones(3)}, tmp_path / "pytorch_model.bin")
        with pytest.raises(WeightsError, match=r"no \.safetensors weight files; found pytorch_model\.bin"):
            choose_format("safetensors", files_of(tmp_path), load_plugins([]), Trace())

    def test_w1_a_named_format_without_files_is_an_error_and_dummy_needs_none(self, tmp_path):
        shards(tmp_path, 1)
        with pytest.raises(
            WeightsError, match=r"load_format='pt' was asked for, .* no \.bin, \.pt or \.pth weight files"
        ):
            self.choose(tmp_path, "pt")
        assert self.choose(tmp_path, "dummy")[0] == "dummy"

    @pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
    def test_w2_a_whole_checkpoint_beside_an_index_is_a_warning_that_names_it(self, tmp_path, whole):
        """Transformers reads the file; here the index decides."""
        stem, _, suffix = whole.partition(".")
        for name in (whole, f"{stem}-00001-of-00001.{suffix}"):
            (tmp_path / name).touch()
        index(tmp_path, f"{whole}.index.json", {"t": f"{stem}-00001-of-00001.{suffix}"})
        _, trace = self.choose(tmp_path)
        [warning] = trace.warnings()
        assert (warning.stage, warning.source) == ("weights", f"{whole}.index.json")
        assert [item.option for item in warning.rejected] == [whole]

    def test_w2_a_whole_checkpoint_that_the_index_names_is_none(self, tmp_path):
        shards(tmp_path, 2)
        (tmp_path / "model.safetensors").touch()
        index(tmp_path, "model.safetensors.index.json", {"t": "model.safetensors", "t1": "model-1.safetensors"})
        _, trace = self.choose(tmp_path)
        assert trace.warnings() == []
        assert [item.option for item in trace.find("files").rejected] == ["model-2.safetensors"]

    def test_w2_a_variant_that_is_left_aside_is_in_the_trace(self, tmp_path):
        for name in ("model.safetensors", "model.fp16.safetensors", "optimizer.safetensors"):
            (tmp_path / name).touch()
        _, trace = self.choose(tmp_path)
        assert [item.option for item in trace.find("files", "weights").rejected] == ["model.fp16.safetensors"]
        assert trace.warnings() == []

    def test_w2_nothing_is_said_where_nothing_is_left_aside(self, tmp_path):
        shards(tmp_path, 2)
        assert self.choose(tmp_path)[1].find("files", "weights") is None

    def test_w1_nothing_there(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(WeightsError, match=r"no weights: looked for safetensors, pt; found config\.json"):
            self.choose(tmp_path)


class TestSafetensors:
    DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    DTYPES += ("float8_e4m3fn", "float8_e5m2", "complex64")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_w7_reads_every_dtype_bit_for_bit(self, tmp_path, dtype):
        value = torch.randn(3, 5).mul(3).to(getattr(torch, dtype))
        save_file({"odd": torch.ones(3, dtype=torch.uint8), "x": value}, tmp_path / "model.safetensors")
        with opened(Safetensors, tmp_path) as source:
            found = source.read("x")
            assert found.dtype == value.dtype
            assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))

    def test_w7_unaligned_data_and_scalars_and_empty_tensors(self, tmp_path):
        header = json.dumps(
            {
                "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                "b": {"dtype": "F32", "shape": [], "data_offsets": [3, 7]},
                "c": {"dtype": "F32", "shape": [0, 2], "data_offsets": [7, 7]},
            }
        ).encode()
        data = b"\1\2\3" + torch.tensor(2.5).numpy().tobytes()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        with opened(Safetensors, tmp_path) as source:
            assert source.read("b").item() == 2.5
            assert source.read("b").shape == ()
            assert source.read("c").shape == (0, 2)
            assert source.read("a").tolist() == [1, 2, 3]

    def test_w7_an_index_reads_a_slice_and_release_loses_nothing(self, tmp_path):
        values = torch.randn(64, 4096)
        save_file({"x": values, "y": values + 1}, tmp_path / "model.safetensors")
        with opened(Safetensors, tmp_path) as source:
            part = source.read("x", (slice(3, 9), slice(0, 5)))
            assert torch.equal(part, values[3:9, :5])
            source.release("x")
            assert torch.equal(source.read("x"), values)
            assert torch.equal(source.read("y"), values + 1)

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    @pytest.mark.parametrize("backwards", [False, True])
    def test_w7_releasing_small_tensors_gives_pages_back(self, tmp_path, backwards):
        save_file({f"{i:02}": torch.ones(256 << 10) for i in range(48)}, tmp_path / "model.safetensors")

        with opened(Safetensors, tmp_path) as source:
            before = resident_of_files()
            for name in sorted(source.entries(), reverse=backwards):
                assert source.read(name).sum().item() == 256 << 10
                source.release(name)
                assert resident_of_files() - before < 8 << 20

    def test_w7_writing_to_a_view_never_reaches_the_file(self, tmp_path):
        save_file({"x": torch.zeros(1024)}, tmp_path / "model.safetensors")
        before = (tmp_path / "model.safetensors").read_bytes()
        with opened(Safetensors, tmp_path) as source:
            source.read("x").fill_(7)
        assert (tmp_path / "model.safetensors").read_bytes() == before

    def test_a_view_outlives_the_source(self, tmp_path):
        save_file({"x": torch.arange(1024.0)}, tmp_path / "model.safetensors")
        with opened(Safetensors, tmp_path) as source:
            kept = source.read("x")
        del source
        assert kept[1023].item() == 1023.0

    def test_w3_a_damaged_shard_is_seen_on_opening(self, tmp_path):
        shards(tmp_path, 2)
        path = tmp_path / "model-2.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(WeightsError, match=r"model-2\.safetensors cannot be used: truncated"):
            opened(Safetensors, tmp_path)

    def test_w3_a_file_cut_between_opening_and_reading(self, tmp_path):
        path = tmp_path / "model.safetensors"
        save_file({"x": torch.zeros(4096)}, path)
        with opened(Safetensors, tmp_path) as source:
            with path.open("r+b") as file:
                file.truncate(200)
            with pytest.raises(WeightsError, match="became shorter"):
                source.read("x")


def resident_of_files() -> int:
    """Bytes of mapped files that this process has in memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssFile"))


class RunsCode:
    def __reduce__(self):
        return print, ("executed",)


class TestPyTorch:
    def test_w7_shared_storage_legacy_files_and_nesting(self, tmp_path):
        """Case 30."""
        base = torch.randn(8, 4)
        state = {"emb": base, "head": base, "part": base[2:4], "t": base.t()}
        torch.save(state, tmp_path / "a.bin")
        torch.save({"state_dict": {"old": base}, "epoch": 3}, tmp_path / "b.bin", _use_new_zipfile_serialization=False)
        with opened(PyTorchBin, tmp_path) as source:
            for name, value in {**state, "old": base}.items():
                assert torch.equal(source.read(name), value)
                source.release(name)
                assert torch.equal(source.read(name), value)
            assert source.entries()["emb"].file == "a.bin"
            assert source.entries()["emb"].nbytes == 128

    def test_w7_a_compressed_archive_is_read_right(self, tmp_path):
        value = torch.arange(4096.0)
        torch.save({"x": value}, tmp_path / "plain.bin")
        with (
            zipfile.ZipFile(tmp_path / "plain.bin") as plain,
            zipfile.ZipFile(tmp_path / "x.bin", "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for item in plain.infolist():
                packed.writestr(item.filename, plain.read(item), zipfile.ZIP_DEFLATED)
        (tmp_path / "plain.bin").unlink()
        with opened(PyTorchBin, tmp_path) as source:
            assert torch.equal(source.read("x"), value)
            source.release("x")
            assert torch.equal(source.read("x"), value)

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_w7_releasing_gives_pages_back(self, tmp_path):
        torch.save({"x": torch.ones(8 << 20)}, tmp_path / "x.bin")

        with opened(PyTorchBin, tmp_path) as source:
            assert source.read("x").sum().item() == 8 << 20
            before = resident_of_files()
            source.release("x")
            assert before - resident_of_files() > 30 << 20

    @pytest.mark.parametrize("legacy", [False, True])
    def test_w3_a_pickle_that_wants_code_is_refused_and_not_run(self, tmp_path, capsys, legacy):
        """Case 30."""
        torch.save({"x": RunsCode()}, tmp_path / "x.bin", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(WeightsError, match="refused: its pickle holds more than tensors") as caught:
            opened(PyTorchBin, tmp_path)
        assert "print" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "executed" not in capsys.readouterr().out

    def test_w3_a_plain_pickle_that_wants_code(self, tmp_path, capsys):
        (tmp_path / "x.bin").write_bytes(pickle.dumps({"x": RunsCode()}, protocol=2))
        with pytest.raises(WeightsError, match=r"x\.bin"):
            opened(PyTorchBin, tmp_path)
        assert "executed" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            (b"", "empty"),
            (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
            (b"<html></html>", "web page"),
            (b"garbage that is no pickle", "damaged|not a PyTorch file"),
        ],
    )
    def test_w3_damaged_files(self, tmp_path, content, cause):
        """Case 30."""
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(WeightsError, match=cause):
            opened(PyTorchBin, tmp_path)

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
    def test_w3_truncated_files(self, tmp_path, legacy, share):
        path = tmp_path / "x.bin"
        torch.save({"x": torch.ones(5000)}, path, _use_new_zipfile_serialization=not legacy)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        with pytest.raises(WeightsError, match="truncated"):
            opened(PyTorchBin, tmp_path)

    @pytest.mark.parametrize("content", [[1, 2], {"x": 3}, torch.ones(2), {"x": {"y": torch.ones(1)}}])
    def test_only_a_mapping_of_tensors_is_a_state_dict(self, tmp_path, content):
        torch.save(content, tmp_path / "x.bin")
        with pytest.raises(WeightsError, match=r"not a (mapping|state dict)"):
            opened(PyTorchBin, tmp_path)

    def test_w2_sharded_with_index(self, tmp_path):
        for number in (1, 2):
            torch.save({f"t{number}": torch.ones(2)}, tmp_path / f"pytorch_model-{number}.bin")
        index(tmp_path, "pytorch_model.bin.index.json", {"t1": "pytorch_model-1.bin", "t2": "pytorch_model-2.bin"})
        with opened(PyTorchBin, tmp_path) as source:
            assert set(source.entries()) == {"t1", "t2"}
