"""What the server measures of itself, for Prometheus. Each server has a registry of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modelbay_server.stats import EngineStats

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
#: Metric, what it says, which number of a snapshot.
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("modelbay_sequences_waiting", "Sequences that wait for room in a step.", lambda stats: stats.waiting),
    ("modelbay_sequences_running", "Sequences that are computed.", lambda stats: stats.running),
    ("modelbay_kv_cache_usage_ratio", "Share of the KV cache's blocks that are held.", lambda stats: stats.kv_usage),
    ("modelbay_kv_cache_blocks", "Blocks of the KV cache.", lambda stats: stats.blocks),
    ("modelbay_kv_cache_free_blocks", "Blocks that nobody holds.", lambda stats: stats.free_blocks),
    ("modelbay_preemptions", "Preemptions since the model was loaded.", lambda stats: stats.preemptions),
)


class Metrics:
    """Args:
    snapshots: the names of the models that are loaded, and what each engine is doing.
    in_flight: HTTP requests that run or wait in the engines.
    """

    def __init__(
        self, snapshots: Callable[[], Iterable[tuple[str, EngineStats]]], in_flight: Callable[[], int]
    ) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = self._counter("modelbay_prompt_tokens", "Prompt tokens of finished requests.")
        self.output_tokens = self._counter("modelbay_generation_tokens", "Tokens generated, as they come.")
        self.looked_up_tokens = self._counter(
            "modelbay_prefix_cache_query_tokens", "Prompt tokens looked up, for each sequence."
        )
        self.cached_tokens = self._counter("modelbay_prefix_cache_hit_tokens", "Those that the prefix cache had.")
        self.finished = self._counter("modelbay_sequences_finished", "Sequences that ended, by reason.", "reason")
        self.queued = self._histogram("modelbay_queue_seconds", "From arrival to the first step.")
        self.first_token = self._histogram("modelbay_time_to_first_token_seconds", "From arrival in the engine.")
        self.inter_token = self._histogram(
            "modelbay_inter_token_seconds", "Between two tokens of a request: the mean of each request."
        )
        self.request = self._histogram("modelbay_request_seconds", "From arrival to the last token.")
        self.steps = self._histogram("modelbay_step_seconds", "One step of the engine.")
        self.responses = Counter(
            "modelbay_http_responses", "Responses, by route and status.", ["route", "status"], registry=self.registry
        )
        self.cpu = ServerCpu()
        self._gauge("modelbay_requests_in_flight", "HTTP requests that run or wait in the engines.", in_flight)
        self._gauge(
            "modelbay_server_cpu_seconds",
            "CPU time of the server: everything but the steps of the engines.",
            self.cpu.seconds,
        )
        self._gauge(
            "modelbay_server_cpu_seconds_per_token", "The same, for each token generated.", self.cpu.seconds_per_token
        )
        self.registry.register(_Snapshots(snapshots))

    def _counter(self, name: str, documentation: str, *more_labels: str) -> Counter:
        return Counter(name, documentation, ["model", *more_labels], registry=self.registry)

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(name, documentation, ["model"], buckets=_LATENCY, registry=self.registry)

    def _gauge(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        Gauge(name, documentation, registry=self.registry).set_function(value)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def observer(self, model: str) -> ModelObserver:
        return ModelObserver(self, model)


class ServerCpu:
    """CPU time that serving costs: of the event loop's thread, and what other threads add. Seconds."""

    def __init__(self) -> None:
        self._added = 0.0
        self._clock: int | None = None
        self._lock = threading.Lock()
        self.tokens = 0

    def watch_this_thread(self) -> None:
        """Count the calling thread, the event loop's, from now on."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def add(self, seconds: float) -> None:
        with self._lock:
            self._added += seconds

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what the calling thread does inside."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.add(time.thread_time() - began)

    def seconds(self) -> float:
        try:
            own = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            own = 0.0
        return own + self._added

    def seconds_per_token(self) -> float:
        return self.seconds() / self.tokens if self.tokens else 0.0


class _Snapshots(Collector):
    """Gauges that are read when they are asked for."""

    def __init__(self, snapshots: Callable[[], Iterable[tuple[str, EngineStats]]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        taken = list(self._snapshots())
        for name, documentation, value in _GAUGES:
            family = GaugeMetricFamily(name, documentation, labels=["model"])
            for model, stats in taken:
                family.add_metric([model], value(stats))
            yield family


class ModelObserver:
    """One model's measurements; called on its engine's thread."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._prompt = metrics.prompt_tokens.labels(model)
        self._looked_up = metrics.looked_up_tokens.labels(model)
        self._cached = metrics.cached_tokens.labels(model)
        self._output = metrics.output_tokens.labels(model)
        self._finished = lambda reason: metrics.finished.labels(model, reason)
        self._histograms = {
            name: getattr(metrics, name).labels(model)
            for name in ("first_token", "inter_token", "queued", "request", "steps")
        }

    def step(self, seconds: float, cpu_outside: float) -> None:
        self._histograms["steps"].observe(seconds)
        self._metrics.cpu.add(cpu_outside)

    def tokens(self, generated: int) -> None:
        self._output.inc(generated)
        self._metrics.cpu.tokens += generated

    def output(self, output: Any) -> None:
        if not output.finished:
            return
        self._prompt.inc(len(output.prompt_token_ids))
        sequences = output.outputs if isinstance(getattr(output, "outputs", None), list) else []
        counts = [len(sequence.token_ids) for sequence in sequences]
        for sequence in sequences:
            self._finished(sequence.finish_reason or "other").inc()
        if not sequences:
            self._metrics.cpu.tokens += len(output.prompt_token_ids)
        if output.metrics is not None:
            self._looked_up.inc(len(output.prompt_token_ids) * len(sequences))
            self._cached.inc(output.metrics.num_cached_tokens)
            self._times(output.metrics, max(counts, default=0))

    def _times(self, times: Any, longest: int) -> None:
        arrival = times.arrival_time
        if times.first_scheduled_time is not None:
            self._histograms["queued"].observe(times.first_scheduled_time - arrival)
        if times.finished_time is not None:
            self._histograms["request"].observe(times.finished_time - arrival)
        if times.first_token_time is not None:
            self._histograms["first_token"].observe(times.first_token_time - arrival)
            if times.finished_time is not None and longest > 1:
                self._histograms["inter_token"].observe((times.finished_time - times.first_token_time) / (longest - 1))
