"""Results as Markdown: one section of docs/benchmarks.md for each file in benchmarks/results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- generated from benchmarks/results: run `python benchmarks/compare.py --render` -->"
END = "<!-- end of the generated part -->"


def write_result(result: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def record(name: str, result: Mapping[str, Any], path: str | None = None) -> str:
    """Keep a result, under ``name`` among the results and on the page or at ``path`` alone; returns its section."""
    if path:
        write_result(result, Path(path))
    else:
        write_result(result, RESULTS / f"{name}.json")
        update_page()
    return render(name, result)


def update_page(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Replace the generated part of the page; what people wrote around it stays."""
    page.write_text(page_with(page.read_text(encoding="utf-8"), render_all(results)), encoding="utf-8")


def page_with(page: str, generated: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no part between {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"


def render_all(results: Path = RESULTS) -> str:
    """Every result, by the name of its file."""
    paths = sorted(results.glob("*.json"))
    if not paths:
        return "No result has been recorded yet."
    return "\n\n".join(render(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in paths)


def render(name: str, result: Mapping[str, Any]) -> str:
    """One section: what was measured, its tables, and where."""
    if result["kind"] == "startup":
        return "\n\n".join([f"## {name}", *_startup(result), _place(result)])
    bodies = {"loading": _loading, "parallel": _parallel, "embeddings": _embeddings, "serving": _serving}
    body = bodies.get(result["kind"], _comparison)(result)
    return "\n\n".join([f"## {name}", _subject(result), *body, _place(result)])


def _subject(result: Mapping[str, Any]) -> str:
    size = f"{result['model']['bytes'] / 1e6:,.1f} MB of parameters"
    return f"{result['model']['architecture']}, {result['dtype']}, {size}. Rounds: {result['rounds']}."


def _comparison(result: Mapping[str, Any]) -> Iterator[str]:
    baseline = result["baseline"]
    if shapes := result.get("shapes"):
        engines = list(shapes[0]["engines"])
        yield f"Speed as a ratio to `{baseline}`: the median of the rounds (lowest to highest). More is better."
        yield _table(["shape", *_code(engines)], ([_code([s["shape"]])[0], *_ratios(s, engines)] for s in shapes))
        yield "Tokens per second in that run (medians):"
        yield _table(["shape", *_code(engines), "counted"], ([s["shape"], *_medians(s, engines)] for s in shapes))
        yield f"Cores in use (median of the shapes): {', '.join(f'`{e}` {_cores(shapes, e):.2f}' for e in engines)}."
        if agreement := ", ".join(f"`{e}` {_agreement(shapes, e)}" for e in engines if e != baseline):
            yield f"First output tokens that equal those of `{baseline}`: {agreement}."
    if start := result.get("start"):
        engines = list(start["engines"])
        yield f"From the start of a process to its first token, as a ratio to `{baseline}`. Less is better."
        rows = [["ratio", *_ratios(start, engines)], ["seconds", *_medians(start, engines)[:-1]]]
        yield _table(["start", *_code(engines)], rows)


def _loading(result: Mapping[str, Any]) -> Iterator[str]:
    loaders = result["loaders"]
    yield (
        f"Loading from warm files, as a ratio to `{result['baseline']}` (less is better), and the peak of resident "
        "memory above what the process had before, over the bytes of the parameters."
    )
    rows = (
        [_code([name])[0], _ratio(one["ratio"]), f"{one['median']:.2f}", _ratio(one["peak"])]
        for name, one in loaders.items()
    )
    yield _table(["loader", "time, ratio", "time, s", "peak memory / parameters"], rows)
    yield (
        "`modelbay` ends with every parameter in memory, as the others do; `modelbay-repacked` goes on to the form "
        f"that the chosen kernels multiply fastest. Limits: {result['time_limit']:.2f} × the time of "
        f"`{result['baseline']}` for `modelbay`; for both, 1.15 × the parameters and one largest tensor of memory, "
        f"here {result['limit']:.2f} × the parameters."
    )


def _startup(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Commands that run no model, as a ratio of CPU time to an interpreter that only imports what is named (less is "
        f"better), and of wall time in the same run. Rounds: {result['rounds']}."
    )
    rows = [
        [
            _code([name])[0] if name != group["baseline"] else name,
            _ratio(row["ratio"]),
            _ratio(row["wall_ratio"]),
            f"{row['cpu']['median']:.2f}",
            f"{group['limit']:.1f}" if "limit" in group and name != group["baseline"] else "",
        ]
        for group in result["groups"]
        for name, row in group["commands"].items()
    ]
    yield _table(["command", "CPU time, ratio", "wall time, ratio", "CPU time, s", "limit"], rows)
    large = result["large"]
    yield (
        "`explain` on DeepSeek-V3's config, its 671 billion parameters built on the meta device: "
        f"{large['median']:.1f} s ({large['min']:.1f} to {large['max']:.1f}); the limit is {large['limit']:.0f} s."
    )


def _embeddings(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{result['texts']:,} new texts of mixed length in each round, tokenizing included; the rate as a ratio to "
        f"`{result['baseline']}` (more is better). The target is {result['target']:g}."
    )
    rows = ([_code([name])[0], _ratio(one["ratio"]), f"{one['median']:,.0f}"] for name, one in result["rates"].items())
    yield _table(["engine", "ratio", "texts per second"], rows)
    yield f"The largest cosine distance between the two embeddings of one text is {result['distance']:.1g}."


def _parallel(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Per decoded token at one sequence (rank 0's collectives, and what all stages hand on), beside the least that "
        "the algorithm needs: two sums of a hidden state per layer, one hidden state per boundary between stages."
    )
    rows = [
        [
            traffic["mesh"],
            f"`{name}`",
            f"{traffic['calls'][name]:g}",
            f"{traffic['least_calls'].get(name, 0):g}",
            f"{size:,.0f}",
            f"{traffic['least_bytes'].get(name, 0):,.0f}",
        ]
        for traffic in result["traffic"]
        for name, size in traffic["bytes"].items()
    ]
    yield _table(["mesh", "collective", "calls", "least", "bytes", "least"], rows)
    yield (
        "Resident memory at the peak of loading, over the bytes that the rank holds: its parameters, and a second form "
        "of a head that is tied to an embedding on the same rank, where the kernels multiply another form than is "
        f"looked up. The limit is {result['memory_limit']:g}."
    )
    memory = [
        [one["mesh"], str(one["rank"]), f"{one['share'] / 1e6:,.1f}", f"{one['read'] / 1e6:,.1f}",
         f"{one['held'] / 1e6:,.1f}", f"**{one['ratio']:.2f}**"]
        for one in result["memory"]
    ]  # fmt: skip
    yield _table(["mesh", "rank", "parameters, MB", "read, MB", "held, MB", "peak / held"], memory)
    step = result["step"]
    yield (
        "A decode step of one sequence, one thread: "
        f"{step['inline']['median']:.2f} ms in one process, {step['led']['median']:.2f} ms where another rank is led; "
        f"the executor takes **{step['extra']['median']:.2f} ms** ({step['extra']['min']:.2f} to "
        f"{step['extra']['max']:.2f}) of each; the limit is {result['step_limit_ms']:g} ms."
    )


def _serving(result: Mapping[str, Any]) -> Iterator[str]:
    servers, targets, later = result["servers"], result["targets"], result["first_token_later_ms"]
    yield (
        f"`{result['shape']}`: requests at once, with prompt and output tokens. Output tokens per second as a ratio to "
        f"`{result['baseline']}`, which is `LLM.generate` on the same texts without a server (more is better; the "
        f"target for `modelbay` is {targets['ratio']:g}); client and server share the cores."
    )
    rows = [
        [_code([name])[0], _ratio(one["ratio"]), f"{one['rate']['median']:,.0f}",
         *([_ratio(one["streamed"]["ratio"])] if "streamed" in one else [""]), f"{one['cores']['median']:.2f}"]
        for name, one in servers.items()
    ]  # fmt: skip
    yield _table(["server", "ratio", "tokens/s", "ratio, streamed", "cores"], rows)
    yield "Milliseconds: to the first piece and between two pieces while all requests are streamed, and alone:"
    times = [
        [_code([name])[0], *_two(one["streamed"]["first_ms"]), *_two(one["streamed"]["between_ms"]),
         f"{one['alone_ms']['median']:.1f}"]
        if "streamed" in one
        else [_code([name])[0], "", "", "", "", f"{one['alone_ms']['median']:.1f}"]
        for name, one in servers.items()
    ]  # fmt: skip
    yield _table(["server", "first, median", "99 %", "between, median", "99 %", "first, one client alone"], times)
    cost = result["server_cpu_us_per_token"]
    yield (
        f"To one client alone the first token of `modelbay` comes **{later['median']:.1f} ms** later than without a "
        f"server ({later['min']:.1f} to {later['max']:.1f}); the limit is {targets['later_ms']:g} ms. By its own "
        f"account serving takes {cost['whole']['median']:.0f} µs of CPU time for each token, streamed "
        f"{cost['streamed']['median']:.0f} µs. The client takes {result['client']['cpu_us_per_token']:.0f} µs for each "
        f"token that is streamed, and {result['client']['first_ms']:.1f} ms of the time to the first token."
    )


def _two(spread: Mapping[str, Any]) -> list[str]:
    return [f"{spread[name]:,.0f}" if name in spread else "" for name in ("p50", "p99")]


def _place(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    versions = "; ".join(_engine(name, about) for name, about in result.get("engines", {}).items())
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    if machine["instructions"]:
        where += f" ({', '.join(machine['instructions'])})"
    sentence = f"Measured {result['date']} at `{_short(result['commit'])}` on {where}."
    return f"{sentence} Engines: {versions}." if versions else sentence


def _engine(name: str, about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{library} {version}" for library, version in about["versions"].items())
    threads = f"with {about['threads']} threads, " if "threads" in about else ""
    return f"`{name}` {threads}{versions}"


def _short(commit: str) -> str:
    number, plus, changes = commit.partition("+")
    return number[:12] + plus + changes


def _ratios(measured: Mapping[str, Any], engines: Sequence[str]) -> list[str]:
    return [_ratio(measured["engines"][engine]["ratio"]) for engine in engines]


def _ratio(spread: Mapping[str, Any]) -> str:
    if spread["min"] == spread["max"]:
        return f"{spread['median']:.2f}"
    return f"**{spread['median']:.2f}** ({spread['min']:.2f} to {spread['max']:.2f})"


def _medians(measured: Mapping[str, Any], engines: Sequence[str]) -> list[str]:
    values = [measured["engines"][engine]["median"] for engine in engines]
    return [*(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values), measured["unit"]]


def _cores(shapes: Sequence[Mapping[str, Any]], engine: str) -> float:
    return statistics.median(shape["engines"][engine]["cores"]["median"] for shape in shapes)


def _agreement(shapes: Sequence[Mapping[str, Any]], engine: str) -> str:
    counts = [shape["engines"][engine]["first_tokens"] for shape in shapes]
    return f"{sum(count['equal'] for count in counts)} of {sum(count['of'] for count in counts)}"


def _code(names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
