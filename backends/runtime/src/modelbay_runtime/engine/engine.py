"""The engine: requests in, outputs as they grow. One step computes one batch and draws one token per sequence."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import torch

from modelbay.errors import EngineError, UsageError
from modelbay.resolve import Resolution
from modelbay.tokenizer import load_tokenizer, stop_token_ids
from modelbay_runtime.build import build_model
from modelbay_runtime.engine.block_pool import BlockPool
from modelbay_runtime.engine.detokenizer import Detokenizer
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.kv_layout import CacheLayout, plan_layout
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.logprobs import logprobs_of
from modelbay_runtime.engine.memory import longest_that_fits, plan_cache, step_tokens
from modelbay_runtime.engine.outputs import HiddenStatesOutput, RequestMetrics, RequestOutput
from modelbay_runtime.engine.prompts import Prompt, fit_prompt
from modelbay_runtime.engine.request import Request
from modelbay_runtime.engine.runner import Runner, StepOutput
from modelbay_runtime.engine.sampler import Sampler
from modelbay_runtime.engine.sampling_state import encode_bad_words
from modelbay_runtime.engine.scheduler import Scheduled, Scheduler
from modelbay_runtime.engine.sequence import Sequence
from modelbay_runtime.loading import load_weights
from modelbay_runtime.sampling_params import PoolingParams, SamplingParams

logger = logging.getLogger("modelbay")


class Engine:
    """A loaded model with its cache, scheduler and sampler.

    Attributes:
        model: the module. tokenizer: as Transformers returns it.
        load_report: what became of every tensor.
        max_model_len: longest sequence that is served, in tokens.
    """

    def __init__(self, resolution: Resolution) -> None:
        self.resolution = resolution
        args, config = resolution.args, resolution.config
        built = build_model(resolution)
        context = built.context
        self.tokenizer: Any = load_tokenizer(resolution.files, config, resolution.plugins, args, resolution.trace)
        self.load_report = load_weights(built.module, resolution, device=context.device, dtype=context.dtype)
        self.model = built.module.eval()
        layout = plan_layout(built.kv_specs, args.block_size)
        budget = plan_cache(layout, config, args, context.device, context.dtype.itemsize, built.max_model_len)
        pool = BlockPool(budget.num_blocks)
        self.max_model_len = self._fit_length(layout, pool.num_usable, built.max_model_len)
        self.kv = KVManager(layout, pool, args.max_num_seqs, self.max_model_len, args.enable_prefix_caching)
        self.cache = KVCache(layout, budget.num_blocks, context.dtype, context.device)
        batched_tokens = step_tokens(args, self.max_model_len)
        self.scheduler = Scheduler(self.kv, args.max_num_seqs, batched_tokens, args.enable_chunked_prefill)
        self.runner = Runner(built, self.kv, self.cache)
        self.eos_token_ids = self._eos_token_ids()
        self.sampler = Sampler(config.vocab_size, context.device, args.seed)
        self.detokenizer = Detokenizer(self.tokenizer, self.eos_token_ids)
        self.requests: dict[str, Request] = {}
        self._ordinals = itertools.count()
        per_sequence = layout.blocks_for(self.max_model_len, batched_tokens)
        self._say_cache(budget.bytes, budget.source, per_sequence, pool.num_usable)

    # ---- what is fixed when the engine starts ----------------------------------------------------------------------

    def _fit_length(self, layout: CacheLayout, usable: int, length: int) -> int:
        """The model's length, or what the cache can hold of it if nobody asked for more."""
        fitting = longest_that_fits(layout, self.resolution.args, length, usable)
        if fitting < length:
            reason = f"the cache holds no more ({length} in the config)"
            self.resolution.trace.warn("engine", "max_model_len", fitting, reason)
        return fitting

    def _eos_token_ids(self) -> frozenset[int]:
        """The union of what config, generation_config and tokenizer call the end (BEHAVIOUR C10)."""
        ids = stop_token_ids(self.resolution.config, self.tokenizer)
        self.resolution.trace.decide("engine", "stop tokens", list(ids), "config, generation_config and tokenizer")
        return frozenset(ids)

    def _say_cache(self, size: int, source: str, blocks_per_sequence: int, usable: int) -> None:
        groups = self.kv.layout.groups
        tokens = 0 if not groups else int(usable / max(blocks_per_sequence, 1) * self.max_model_len)
        text = f"{size / 2**20:,.0f} MiB, {usable:,} blocks, {tokens:,} tokens"
        self.resolution.trace.decide("engine", "KV cache", text, source)
        logger.info("KV cache: %s (%s)", text, source)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, *, stream: bool = False) -> None:
        """Queue a request; the model's own defaults fill what ``params`` does not say.

        Args:
            stream: whether `step` returns its outputs as they grow, or only once, finished.

        Raises:
            UsageError: it could never be served; nothing is queued.
        """
        if request_id in self.requests:
            raise UsageError(f"request id {request_id!r} is in use.")
        params = params.with_defaults(self.resolution.config.generation)
        token_ids = fit_prompt(prompt, params, self.max_model_len)
        metrics = RequestMetrics(arrival_time=time.monotonic())
        ordinal = next(self._ordinals)
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(request_id, index, len(token_ids), list(token_ids))
            sequence.reads_prefix_cache = params.prompt_logprobs is None or index > 0
            sequence.leader = sequences[0] if sequences else None
            sequence.sampling = self.sampler.state(
                params, token_ids, sequence.output_ids,
                request_id=request_id, ordinal=ordinal, index=index, eos_token_ids=self.eos_token_ids,
                bad_words=self._bad_words(params),
            )  # fmt: skip
            sequence.text = self.detokenizer.stream(params, token_ids)
            sequences.append(sequence)
        self.requests[request_id] = Request(request_id, prompt.text, token_ids, params, sequences, metrics, stream)
        for sequence in sequences:
            self.scheduler.add(sequence)

    def add_pooling_request(self, request_id: str, prompt: Prompt, params: PoolingParams) -> None:
        """Queue a request for the last hidden states of a prompt.

        Raises:
            UsageError: it could never be served; nothing is queued.
        """
        if request_id in self.requests:
            raise UsageError(f"request id {request_id!r} is in use.")
        token_ids = fit_prompt(prompt, params, self.max_model_len)
        sequence = Sequence(request_id, 0, len(token_ids), list(token_ids), reads_prefix_cache=False)
        metrics = RequestMetrics(arrival_time=time.monotonic())
        self.requests[request_id] = Request(request_id, prompt.text, token_ids, params, [sequence], metrics)
        self.scheduler.add(sequence)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise UsageError("bad_words needs a tokenizer, and this model was loaded without one.")
        return encode_bad_words(params.bad_words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks; unknown ids are fine."""
        request = self.requests.pop(request_id, None)
        for sequence in request.sequences if request else ():
            self.scheduler.finish(sequence)

    # ---- one step --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput | HiddenStatesOutput]:
        """Compute one batch; the outputs of requests that finished, and of streaming ones that grew.

        Whatever is raised, requests that the caller does not abort go on with the next step.

        Raises:
            EngineError: logits that are no numbers, or a cache too small for one sequence.
        """
        try:
            scheduled = self.scheduler.schedule()
            return self._compute(scheduled) if scheduled else []
        except BaseException as error:
            self.scheduler.start_over()
            if isinstance(error, EngineError):
                # Rows that are no numbers would spread: zero times NaN is NaN, so that even a masked key is felt.
                self.kv.pool.forget()
                self.cache.clear()
            raise

    def _compute(self, scheduled: list[Scheduled]) -> list[RequestOutput | HiddenStatesOutput]:
        for item in scheduled:
            self.requests[item.sequence.request_id].mark_scheduled()
        output = self.runner.run(scheduled)
        self._take_prompt_logprobs(scheduled, output)
        self._take_hidden(scheduled, output)
        for item in scheduled:
            item.sequence.num_computed += item.num_new
            self.kv.publish(item.sequence)
        generated = self._take_tokens(output)  # first: where it raises, no output is lost that was taken already
        return [*self._finish_pooling(scheduled), *generated]

    @staticmethod
    def _take_hidden(scheduled: list[Scheduled], output: StepOutput) -> None:
        for item in scheduled:
            sequence = item.sequence
            if sequence.sampling is None:
                if not sequence.num_computed:
                    sequence.hidden.clear()  # it starts over after a preemption
                begin = output.begin[sequence]
                sequence.hidden.append(output.hidden[begin : begin + item.num_new].float().cpu())

    def _finish_pooling(self, scheduled: list[Scheduled]) -> list[HiddenStatesOutput]:
        outputs = []
        for sequence in [item.sequence for item in scheduled if item.sequence.sampling is None]:
            if sequence.num_computed == len(sequence):
                self.scheduler.finish(sequence)
                outputs.append(self.requests.pop(sequence.request_id).hidden_states())
        return outputs

    def _take_tokens(self, output: StepOutput) -> list[RequestOutput]:
        if output.logits is None:
            return []
        with torch.inference_mode():
            drawn = self.sampler.sample(output.logits, [self._state(sequence) for sequence in output.sampled])
        changed: dict[str, Request] = {}
        for sequence, token_id, logprobs in zip(output.sampled, drawn.token_ids, drawn.logprobs, strict=True):
            request = self.requests[sequence.request_id]
            request.mark_token()
            sequence.append(token_id)
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            self._end_if_done(sequence, request, token_id)
            changed[request.id] = request
        outputs = []
        for request in changed.values():
            if request.stream or request.finished:
                outputs.append(request.output(self.detokenizer))
            if request.finished:
                del self.requests[request.id]
        return outputs

    @staticmethod
    def _state(sequence: Sequence) -> Any:
        assert sequence.sampling is not None, "a sequence that is sampled has its state"
        return sequence.sampling

    def _end_if_done(self, sequence: Sequence, request: Request, token_id: int) -> None:
        assert sequence.text is not None, "a sequence in the engine has its text stream"
        update = sequence.text.append(token_id)
        reason, stop = update.finish_reason, update.stop_reason
        assert isinstance(request.params, SamplingParams), "only generation draws tokens"
        full = len(sequence) >= self.max_model_len
        if reason is None and (full or len(sequence.output_ids) == request.params.max_tokens):
            last = sequence.text.finish()
            reason, stop = last.finish_reason or "length", last.stop_reason
        if reason is not None:
            sequence.finish_reason, sequence.stop_reason = reason, stop
            self.scheduler.finish(sequence)

    def _take_prompt_logprobs(self, scheduled: list[Scheduled], output: StepOutput) -> None:
        for item in scheduled:
            sequence = item.sequence
            params = self.requests[sequence.request_id].params
            k = params.prompt_logprobs if isinstance(params, SamplingParams) else None
            # A row predicts the token after it: rows of the prompt but its last one, each once even after preemption.
            first = max(sequence.num_computed, len(sequence.prompt_logprobs))
            last = min(sequence.num_computed + item.num_new, sequence.num_prompt - 1)
            if k is None or sequence.index or first >= last:
                continue
            begin = output.begin[sequence] + first - sequence.num_computed
            hidden = output.hidden[begin : begin + last - first]
            for offset, logits in self.runner.prompt_logits(hidden):
                at = first + offset + 1
                targets = torch.tensor(sequence.token_ids[at : at + len(logits)], device=logits.device)
                vocab = logits[:, : self.sampler.vocab_size]
                sequence.prompt_logprobs += logprobs_of(vocab, targets, k)
