"""What serving costs: `modelbay serve` beside `LLM.generate` on the same requests and beside other servers, in one run.

    python benchmarks/serving.py --model DIR [--servers modelbay,transformers,vllm --vllm-python PATH]

Everything is measured in turn while the others stand still: requests at once without streaming, the same streamed, and
one client alone, for the time to its first token. The client's own part is measured against a server that answers at
once. The result goes to benchmarks/results/NAME.json and into docs/benchmarks.md; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import about_model, report, say, warn_if_busy
from comparison import machine, servers
from comparison.engines import CACHE_BYTES
from comparison.http_client import Answer, Client
from comparison.processes import EngineSpec, Worker
from comparison.servers import RunningServer, ServerSpec

from modelbay import resolve
from modelbay.errors import EngineError, ModelbayError, UsageError
from modelbay_runtime.bench import Shape, Spread, ratios

OFFLINE = "offline"
SERVERS = ("modelbay", "transformers", "vllm", "vllm-eager")
#: The least share of the throughput without a server, and the most that the first token may come later.
TARGET_RATIO, TARGET_MS = 0.9, 5.0
MAX_MODEL_LEN = 1024


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        report(run(options), options)
    except (ModelbayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ModelbayError) else 1
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = made.add_argument
    add("--model", metavar="DIR", required=True, help="directory of the checkpoint")
    add("--shape", default="32x64+48", help="requests at once x prompt + output tokens")
    add("--servers", default="modelbay", help=f"in the order of their turns; known: {', '.join(SERVERS)}")
    add("--vllm-python", metavar="PATH", help="interpreter of the environment that has vLLM")
    add("--rounds", type=int, default=3, help="counted rounds")
    add("--alone", type=int, default=12, help="requests of one client alone, in each round")
    add("--dtype", default="bfloat16")
    add("--name", default="serving", help="of the result")
    add("--json", nargs="?", const="-", metavar="FILE", help="print the result as JSON; with FILE write it there")
    return made


@dataclass
class Measured:
    """One engine or server: a number for each round; for what is counted per request or per piece, all of them."""

    rate: list[float] = field(default_factory=list)
    streamed_rate: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    server_cpu: dict[str, list[float]] = field(default_factory=lambda: {"whole": [], "streamed": []})


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Raises UsageError for what makes no sense, EngineError where something fails."""
    shape, resolution = Shape.parse(options.shape), resolve(options.model, dtype=options.dtype)
    specs = server_specs(options)
    about = {"kind": "serving", **about_model(resolution), "dtype": options.dtype, **machine.facts()}
    warn_if_busy(about["machine"])
    settings = {"model": options.model, "dtype": options.dtype, "max_model_len": MAX_MODEL_LEN}
    with ExitStack() as stack:
        offline = stack.enter_context(
            Worker(EngineSpec(OFFLINE, "comparison.engines:ModelbayTexts", settings=settings))
        )
        facts = {OFFLINE: offline.answer(), **{spec.name: {"versions": spec.versions()} for spec in specs}}
        offline.pause()
        running = [start(spec, stack) for spec in specs]
        rounds = Rounds(shape, words_of(options.model), options.alone)
        for number in range(options.rounds + 1):
            rounds.run(number, offline, running)
        stub = stack.enter_context(RunningServer(servers.stub()))
        own = Measured()
        for number in (-1, -2):  # the first warms up
            own = rounds.serve(stub, rounds.texts(number), rounds.texts(number - 100))
    return {**about, "rounds": options.rounds, "shape": str(shape), "engines": facts} | summary(rounds.found, own)


def server_specs(options: argparse.Namespace) -> list[ServerSpec]:
    names = [name.strip() for name in options.servers.split(",")]
    unknown = [name for name in names if name not in SERVERS]
    if unknown or names[0] != "modelbay" or options.rounds < 1 or options.alone < 1:
        raise UsageError(f"--servers wants modelbay first, then any of {', '.join(SERVERS[1:])}; numbers from 1 on.")
    if any(name.startswith("vllm") for name in names) and not options.vllm_python:
        raise UsageError("vLLM has an environment of its own: give its interpreter with --vllm-python PATH.")
    model = str(Path(options.model).resolve())
    made = {
        "modelbay": lambda: servers.modelbay(model, options.dtype, MAX_MODEL_LEN, CACHE_BYTES),
        "transformers": lambda: servers.transformers(model, options.dtype),
        "vllm": lambda: servers.vllm(model, options.dtype, MAX_MODEL_LEN, options.vllm_python, eager=False),
        "vllm-eager": lambda: servers.vllm(model, options.dtype, MAX_MODEL_LEN, options.vllm_python, eager=True),
    }
    return [made[name]() for name in names]


def start(spec: ServerSpec, stack: ExitStack) -> RunningServer:
    server = stack.enter_context(RunningServer(spec))
    say(f"{spec.name}: started in {server.load_seconds:.1f} s")
    server.pause()
    return server


def words_of(model: str) -> list[str]:
    """Words that are one token each, with the space before them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    texts = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
    return [text for text in texts if re.fullmatch(" [a-z]{3,}", text)]


class Rounds:
    """Every round has new texts, so that no cache has seen them; all of a round get the same."""

    def __init__(self, shape: Shape, words: Sequence[str], alone: int) -> None:
        self.shape, self.words, self.alone = shape, words, alone
        self.found: dict[str, Measured] = {}

    def texts(self, number: int) -> list[str]:
        """For the requests at once, then for the client alone."""
        draw = random.Random(number)
        return [
            "".join(draw.choices(self.words, k=self.shape.prompt)) for _ in range(self.shape.sequences + self.alone)
        ]

    def run(self, number: int, offline: Worker, running: Sequence[RunningServer]) -> None:
        whole, streamed = self.texts(2 * number), self.texts(2 * number + 1)
        results = {OFFLINE: self.generate(offline, whole)}
        for server in running:
            server.resume()
            results[server.name] = self.serve(server, whole, streamed)
            server.pause()
        say(f"{f'round {number}' if number else 'warm-up'}: " + ", ".join(map(shown, results.items())))
        if number == 0:
            return
        for name, one in results.items():
            add(self.found.setdefault(name, Measured()), one)

    def generate(self, offline: Worker, texts: list[str]) -> Measured:
        """Without a server."""
        found, at = Measured(), self.shape.sequences
        offline.resume()
        offline.send(prompts=texts[:at], max_tokens=self.shape.output)
        answer = offline.answer()
        found.rate.append(self.shape.rate(answer["seconds"]))
        found.cores.append(answer["cores"])
        for text in texts[at:]:
            offline.send(text=text, max_tokens=1)
            found.alone.append(offline.answer()["seconds"])
        offline.pause()
        return found

    def serve(self, server: RunningServer, whole: list[str], streamed: list[str]) -> Measured:
        try:
            return asyncio.run(self._serve(server, whole, streamed))
        except (EngineError, OSError) as error:
            raise EngineError(f"{server.name}: {error} Its last words: {server.last_words()}") from error

    async def _serve(self, server: RunningServer, whole: list[str], streamed: list[str]) -> Measured:
        found, at, client = Measured(), self.shape.sequences, Client(server.port)
        plain = {**server.body(self.shape.output)}
        cpu, began = server.cpu_seconds(), time.perf_counter()
        found.rate.append(
            await self._timed(server, client, [{**plain, "prompt": t} for t in whole[:at]], found, "whole")
        )
        found.cores.append((server.cpu_seconds() - cpu) / (time.perf_counter() - began))
        for text in whole[at:]:
            one = await client.ask({**server.body(4), "prompt": text, "stream": True})
            found.alone.append(one.first)
        bodies = [{**plain, "prompt": text, "stream": True} for text in streamed[:at]]
        found.streamed_rate.append(await self._timed(server, client, bodies, found, "streamed"))
        await client.close()
        return found

    async def _timed(self, server: RunningServer, client: Client, bodies: Any, found: Measured, kind: str) -> float:
        before, own, began = server_cpu(server), time.process_time(), time.perf_counter()
        answers = await client.ask_all(bodies)
        seconds, own = time.perf_counter() - began, time.process_time() - own
        tokens = self.shape.sequences * self.shape.output
        self._check(server.name, answers)
        if before is not None:
            after = server_cpu(server)
            assert after is not None
            found.server_cpu[kind].append((after - before) / tokens)
        if kind == "streamed":
            found.first += [answer.first for answer in answers]
            found.between += [gap for answer in answers for gap in answer.gaps()]
            found.client_cpu.append(own / tokens)
        return self.shape.rate(seconds)

    def _check(self, name: str, answers: Sequence[Answer]) -> None:
        wrong = [each.tokens for each in answers if each.tokens not in (None, self.shape.output)]
        if wrong or not all(answer.text for answer in answers):
            raise EngineError(
                f"{name}: answers of {self.shape.output} tokens were asked for, and {wrong or 'none'} came."
            )


def server_cpu(server: RunningServer) -> float | None:
    """CPU seconds of everything but the model, as our own server counts them."""
    if server.name != "modelbay":
        return None
    found = re.search(r"^modelbay_server_cpu_seconds (\S+)$", server.get("/metrics"), re.M)
    return float(found[1]) if found else None


def add(total: Measured, one: Measured) -> None:
    for name in ("rate", "streamed_rate", "first", "between", "alone", "cores", "client_cpu"):
        getattr(total, name).extend(getattr(one, name))
    for kind, values in one.server_cpu.items():
        total.server_cpu[kind] += values


def shown(item: tuple[str, Measured]) -> str:
    name, one = item
    streamed = f" ({one.streamed_rate[0]:.0f} streamed)" if one.streamed_rate else ""
    return f"{name} {one.rate[0]:.0f} tokens/s{streamed}, first {1000 * statistics.median(one.alone):.1f} ms"


def summary(found: dict[str, Measured], own: Measured) -> dict[str, Any]:
    """Rates as ratios to the one without a server, times in milliseconds."""
    offline, ours = found[OFFLINE], found["modelbay"]
    rows = {name: row(one, offline) for name, one in found.items()}
    later = [1000 * (served - alone) for served, alone in zip(ours.alone, offline.alone, strict=True)]
    ratio, extra = rows["modelbay"]["ratio"]["median"], statistics.median(later)
    return {
        "baseline": OFFLINE,
        "servers": rows,
        "first_token_later_ms": Spread.of(later).to_dict(),
        "server_cpu_us_per_token": {
            k: Spread.of(1e6 * each for each in v).to_dict() for k, v in ours.server_cpu.items()
        },
        "client": {
            "cpu_us_per_token": 1e6 * statistics.median(ours.client_cpu),
            "first_ms": 1000 * statistics.median(own.alone),
        },
        "targets": {"ratio": TARGET_RATIO, "later_ms": TARGET_MS},
        "within_targets": {"ratio": ratio >= TARGET_RATIO, "later_ms": extra <= TARGET_MS},
    }


def row(one: Measured, offline: Measured) -> dict[str, Any]:
    made: dict[str, Any] = {
        "rate": Spread.of(one.rate).to_dict(),
        "ratio": ratios(one.rate, offline.rate).to_dict(),
        "alone_ms": Spread.of(1000 * each for each in one.alone).to_dict(),
        "cores": Spread.of(one.cores).to_dict(),
    }
    if one.streamed_rate:
        made["streamed"] = {
            "rate": Spread.of(one.streamed_rate).to_dict(),
            "ratio": ratios(one.streamed_rate, offline.rate).to_dict(),
            "first_ms": percentiles(one.first),
            "between_ms": percentiles(one.between),
        }
    return made


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    if len(seconds) < 2:
        return {}
    cuts: Callable[[int], float] = statistics.quantiles([1000 * each for each in seconds], n=100).__getitem__
    return {"p50": cuts(49), "p99": cuts(98)}


if __name__ == "__main__":
    sys.exit(main())
