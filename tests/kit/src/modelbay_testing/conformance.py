"""What every model family must hold: subclass `ModelConformance` in your plugin's tests.

::

    class TestAcme(ModelConformance):
        plugin = "acme_tinylm.plugin"
        model_type = "acme"
        variants = {"plain": {}, "tied": {"tie_word_embeddings": True}}

A check that does not apply is left out by name with a reason, in ``left_out``. Deleting or overriding a check without
one fails when the class is made, so that a family cannot quietly stop conforming.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from modelbay.plans import check_pp_plan, name_pattern, place_children
from modelbay.weights.matching import ANOTHER_STAGE
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.plan import layer_styles
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.parallel import RankRun, mesh_logits, run_mesh
from modelbay_testing.tiny import tiny_checkpoint

#: Largest difference of logits from Transformers' own in float32, on tiny random models.
TOLERANCE = 1e-4
_LENGTHS = (1, 5, 16, 33, 120)


def _prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS]


class ModelConformance:
    """See the module's docstring. ``variants``: name -> config values of a tiny checkpoint."""

    plugin: ClassVar[str] = ""
    model_type: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}}
    engine_args: ClassVar[Mapping[str, Any]] = {}
    left_out: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in (name for name in vars(ModelConformance) if name.startswith("test_")):
            if getattr(cls, name, None) is not getattr(ModelConformance, name) and name not in cls.left_out:
                raise TypeError(f"{cls.__name__} changes {name} and gives no reason in left_out.")
        if not cls.variants:
            raise TypeError(f"{cls.__name__} has no variants, so nothing would be checked.")
        unknown = [name for name in cls.left_out if not hasattr(ModelConformance, name)]
        if unknown or not all(cls.left_out.values()):
            raise TypeError(f"{cls.__name__}.left_out: {unknown or cls.left_out}: name a check and give a reason.")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", list(self.variants))

    @pytest.fixture(autouse=True)
    def _leave_out(self, request: pytest.FixtureRequest) -> None:
        reason = self.left_out.get(request.function.__name__)
        if reason:
            pytest.skip(reason)

    def checkpoint(self, path: Path, variant: str) -> Path:
        """A tiny random checkpoint of this family, as Transformers saves it."""
        return tiny_checkpoint(path / variant, self.model_type, **self.variants[variant])

    def load(self, path: Path, **kwargs: Any) -> Any:
        from modelbay import LLM

        return LLM(str(path), **{"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, **self.engine_args, **kwargs})

    def test_the_plugin_module_is_light(self) -> None:
        code = f"import {self.plugin}, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "[]"

    def test_logits_equal_transformers(self, variant: str, tmp_path: Path) -> None:
        """Batched, mixed lengths, prompts in one piece and in chunks, then decode steps through the cache."""
        path = self.checkpoint(tmp_path, variant)
        for chunk in (256, 24):
            with self.load(path, max_num_batched_tokens=chunk) as llm:
                found = engine_logits(llm, _prompts(llm.resolution.config.vocab_size), output_tokens=12)
            expected = transformers_logits(path, [tokens for tokens, _ in found])
            assert worst_difference([logits for _, logits in found], expected) <= TOLERANCE

    def test_output_depends_on_nothing_but_the_request(self, variant: str, tmp_path: Path) -> None:
        """Alone, batched, preempted, or with its prefix cached: the same tokens."""
        path = self.checkpoint(tmp_path, variant)
        with self.load(path) as llm:
            prompts = _prompts(llm.resolution.config.vocab_size)
            alone = [engine_logits(llm, [prompt], output_tokens=24)[0][0] for prompt in prompts]
            again = [tokens for tokens, _ in engine_logits(llm, prompts, output_tokens=24)]
            layout = llm.engine.kv.layout
        assert again == alone
        # Room for the longest sequence and the null block, no more: sequences push each other out.
        room = (layout.blocks_for(160, chunk=16) + 1) * layout.page_elements() * 4
        tight = {"kv_cache_memory_bytes": room, "max_model_len": 160, "max_num_batched_tokens": 16}
        with self.load(path, **tight) as llm:
            crowded = [tokens for tokens, _ in engine_logits(llm, prompts, output_tokens=24)]
            preemptions = llm.engine.scheduler.num_preemptions
        assert crowded == alone
        assert preemptions > 0

    def test_the_tensor_parallel_plan_says_what_the_layers_are(self, tmp_path: Path) -> None:
        """Every pattern of the ArchSpec's plan names layers of some variant, and they are of that style."""
        named: dict[str, set[str]] = {}
        for variant in self.variants:
            with self.load(self.checkpoint(tmp_path, variant)) as llm:
                plan = llm.resolution.arch.tp_plan
                styles = llm.apply_model(layer_styles)[0]
            assert plan, "a family says how it is split"
            for pattern in plan:
                found = {style for name, style in styles.items() if name_pattern(pattern).fullmatch(name)}
                named.setdefault(pattern, set()).update(found)
        assert {pattern: {style} for pattern, style in plan.items()} == named

    def test_d2_ranks_compute_what_one_process_does(self, variant: str, tmp_path: Path) -> None:
        """Layers shared by two ranks, in two stages, and, where there are experts, with these split: the logits are
        Transformers', and over all ranks of a replica every tensor on disk is used."""
        path = self.checkpoint(tmp_path, variant)
        config = self._resolve(path).config
        sequences = [ids for ids in _prompts(config.vocab_size) if 5 <= len(ids) <= 33]
        expected = transformers_logits(path, [[*ids, 0] for ids in sequences])
        for mesh in self._meshes(config.num_experts):
            assert worst_difference(mesh_logits(path, mesh, sequences), expected) <= TOLERANCE, str(mesh)

    def test_x6_stages_have_what_the_pipeline_plan_says(self, tmp_path: Path) -> None:
        """Children before the layers are on the first stage, those after on the last, the others on each; what a stage
        has not it has not read, and together they have read everything."""
        path = self.checkpoint(tmp_path, next(iter(self.variants)))
        config = self._resolve(path).config
        runs: list[RankRun] = run_mesh(path, Mesh(pp=2), [[3, 4, 5]])
        plan = self._resolve(path).arch.pp_plan
        assert plan, "a family says how it is put into stages"
        for run in runs:
            base = run.built.module.model
            children = {name: isinstance(child, torch.nn.ModuleList) for name, child in base.named_children()}
            check_pp_plan(plan, children, "pp_plan")
            first, last = run.context.is_first_stage, run.context.is_last_stage
            tied = {"embed_tokens"} if config.tie_word_embeddings else set()
            for name, place in place_children(plan, children).items():
                here = {"first": first or (last and name in tied), "last": last, "every": True, "split": True}[place]
                assert isinstance(base.get_submodule(name), Absent) is not here, (name, run.context.place)
            assert run.report.unaccounted() == []
            assert set(run.report.ignored_by_rule()) == {ANOTHER_STAGE}
        used = [{name for name, use in run.report.tensors.items() if use.status != "ignored"} for run in runs]
        assert set.union(*used) == set(runs[0].report.tensors)

    def _resolve(self, path: Path) -> Any:
        from modelbay import resolve

        return resolve(str(path), **self.engine_args)

    def _meshes(self, experts: int | None) -> list[Mesh]:
        dense = [Mesh(tp=2), Mesh(pp=2)]
        if not experts:
            return dense
        return [*dense, Mesh(tp=2, pp=2, expert_parallel=True), Mesh(dp=2, tp=2, expert_parallel=True)]

    def test_every_tensor_is_accounted_for(self, variant: str, tmp_path: Path) -> None:
        with self.load(self.checkpoint(tmp_path, variant)) as llm:
            report = llm.load_report
        assert report.unaccounted() == []
        assert {use.status for use in report.tensors.values()} <= {"loaded", "tied"}
        assert {use.status for use in report.parameters.values()} <= {"loaded", "tied"}
