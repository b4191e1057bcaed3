"""Modelbay beside other engines, in one run on one machine: ratios with their spread.

    python benchmarks/compare.py --model DIR --shapes 1x32+64,8x128+64 --engines modelbay,hf --start

Each engine runs in a process of its own, is loaded once, and is measured in turn (A B A B …) while the others stand
still. The result goes to benchmarks/results/NAME.json and into the table of docs/benchmarks.md; see
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.processes import EngineSpec
from comparison.report import record, update_page
from comparison.run import Plan, compare

from modelbay import resolve
from modelbay.errors import ModelbayError, UsageError
from modelbay.resolve import Resolution
from modelbay_runtime.bench import DEFAULT_SHAPES, check_fits, parse_shapes

TARGETS = {
    "modelbay": "comparison.engines:Modelbay",
    "modelbay-transformers": "comparison.engines:ModelbayTransformers",
    "hf": "comparison.engines:HuggingFace",
    "vllm": "comparison.engines:Vllm",
    "vllm-eager": "comparison.engines:VllmEager",
}
#: One process, and a cache of the size that the others get.
VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Longest sequence that engines are set up for, if the shapes need no more and the model has no less.
MAX_MODEL_LEN = 2048


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        return run(options)
    except (ModelbayError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ModelbayError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = made.add_argument
    add("--model", metavar="DIR", help="directory of the checkpoint, or a GGUF file")
    add("--shapes", default=DEFAULT_SHAPES, help="sequences x prompt + output tokens; 'none' with --start alone")
    add("--engines", default="modelbay,hf", help=f"in the order of their turns; known: {', '.join(TARGETS)}")
    add("--baseline", help="the engine that ratios are over (default: hf, or the first)")
    add("--vllm-python", metavar="PATH", help="interpreter of the environment that has vLLM")
    add("--modelbay-args", metavar="JSON", default="{}", help="engine arguments for modelbay, as an object")
    add("--rounds", type=int, default=5, help="counted runs of each shape and engine")
    add("--dtype", default="bfloat16")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--start", action="store_true", help="also: from the start of a process to its first token")
    add("--name", help="of the result (default: the model's directory)")
    add("--json", nargs="?", const="-", metavar="FILE",
        help="print the result as JSON; with FILE write it there, not into results and documentation")  # fmt: skip
    add("--render", action="store_true", help="only write the page from the results that there are")
    add("--make-qwen2-0.5b", dest="make_qwen2", metavar="DIR", help="only write a random checkpoint of that shape")
    return made


def run(options: argparse.Namespace) -> int:
    if options.make_qwen2:
        from comparison.checkpoints import make_qwen2

        print(make_qwen2(Path(options.make_qwen2)))
        return 0
    if options.render:
        update_page()
        return 0
    plan, resolution = make_plan(options)
    result = {"kind": "comparison", **about_model(resolution), "dtype": options.dtype, **machine.facts()}
    warn_if_busy(result["machine"])
    result |= compare(plan, say)
    report(result, options)
    return 0


def make_plan(options: argparse.Namespace) -> tuple[Plan, Resolution]:
    """Everything that can be refused is refused here, before an engine is loaded.

    Raises:
        UsageError: naming the option that makes no sense.
    """
    if not options.model:
        raise UsageError("no model was given.", hint="Use --model DIR.")
    if options.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {options.rounds}.")
    names = engine_names(options.engines)
    baseline = options.baseline or ("hf" if "hf" in names else names[0])
    if baseline not in names:
        raise UsageError(f"--baseline {baseline!r} is not among the engines {', '.join(names)}.")
    shapes = () if options.shapes == "none" else parse_shapes(options.shapes)
    if not shapes and not options.start:
        raise UsageError("--shapes none leaves nothing to measure.", hint="Add --start.")
    modelbay_args = json_object(options.modelbay_args)
    if any(name.startswith("vllm") for name in names) and not options.vllm_python:
        raise UsageError("vLLM has an environment of its own: give its interpreter with --vllm-python PATH.")
    resolution = resolve(options.model, dtype=options.dtype)
    check_fits(shapes, resolution.config.max_model_len)
    longest = max([MAX_MODEL_LEN, *(shape.length for shape in shapes)])
    common = {
        "model": str(Path(options.model).resolve()),
        "dtype": options.dtype,
        "max_model_len": min(longest, resolution.config.max_model_len),
    }
    engines = [engine_spec(name, common, options.vllm_python, modelbay_args) for name in names]
    vocab_size = resolution.config.vocab_size
    return Plan(engines, baseline, shapes, vocab_size, options.rounds, options.seed, options.start), resolution


def engine_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TARGETS:
            raise UsageError(f"unknown engine {name!r}; known: {', '.join(TARGETS)}.")
    if not names or len(set(names)) != len(names):
        raise UsageError(f"--engines wants different engines, got {text!r}.")
    return names


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--modelbay-args is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError(f"--modelbay-args wants a JSON object, got {text}.")
    return value


def engine_spec(
    name: str, common: dict[str, Any], vllm_python: str | None, modelbay_args: dict[str, Any]
) -> EngineSpec:
    if name.startswith("vllm"):
        assert vllm_python is not None, "checked with the options"
        return EngineSpec(name, TARGETS[name], vllm_python, VLLM_ENV, common)
    more = modelbay_args if name.startswith("modelbay") else {}
    return EngineSpec(name, TARGETS[name], settings={**common, **more})


def about_model(resolution: Resolution) -> dict[str, Any]:
    from modelbay_runtime.build import build_model

    size = build_model(resolution).parameter_bytes()
    return {"model": {"architecture": resolution.architecture, "bytes": size}}


def warn_if_busy(facts: dict[str, Any]) -> None:
    if facts["load_before"] > 0.5:
        say(f"warning: the machine is busy (load {facts['load_before']}): expect wide spreads")


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Record the result, or write it where it was wanted; then show it."""
    name = options.name or Path(options.model).resolve().stem
    section = record(name, result, None if options.json == "-" else options.json)
    print(json.dumps(result, indent=1) if options.json == "-" else section)


def say(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
