"""The engine: requests in, outputs as they grow. One step computes one batch and draws one token per sequence."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from typing import Any

import torch

from modelbay.errors import EngineError, UsageError
from modelbay.resolve import Resolution
from modelbay.tokenizer import load_tokenizer, stop_token_ids
from modelbay.weights.accounting import LoadReport
from modelbay_runtime.engine.bad_words import BadWordLists
from modelbay_runtime.engine.batch import Batch, make_batch, prompt_rows
from modelbay_runtime.engine.detokenizer import Detokenizer
from modelbay_runtime.engine.executor import Executor, open_executor
from modelbay_runtime.engine.guess import Guess
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.lanes import Lane, choose_lane, make_lane, under_way
from modelbay_runtime.engine.outputs import PoolingOutput, RequestMetrics, RequestOutput
from modelbay_runtime.engine.prompts import Prompt, check_tokens, fit_prompt
from modelbay_runtime.engine.request import Request
from modelbay_runtime.engine.runner import BatchOutput, Runner
from modelbay_runtime.engine.sampler import Sampler
from modelbay_runtime.engine.scheduler import Scheduled, Scheduler
from modelbay_runtime.engine.sequence import Sequence, Status
from modelbay_runtime.engine.step_output import Round, StepOutput, check_pooled
from modelbay_runtime.multimodal.plan import MediaPlan
from modelbay_runtime.multimodal.reader import MediaReader
from modelbay_runtime.pooling.plan import plan_request
from modelbay_runtime.sampling_params import PoolingParams, SamplingParams
from modelbay_runtime.structured.grammars import Grammars
from modelbay_runtime.structured.mask import Ending

logger = logging.getLogger("modelbay")


class Engine:
    """A loaded model with its cache, scheduler and sampler.

    Attributes:
        tokenizer: as Transformers returns it.
        media: reads images and audio of prompts.
        lanes: replicas of the model, on this host's side.
        max_model_len: longest sequence that is served, in tokens.
        num_generated: tokens drawn since the engine started, also of requests that were given up.
    """

    def __init__(self, resolution: Resolution) -> None:
        self.resolution = resolution
        args, config = resolution.args, resolution.config
        self.tokenizer: Any = load_tokenizer(resolution.files, config, resolution.plugins, args, resolution.trace)
        resolution.trace.log_warnings("tokenizer", logger)
        self.executor: Executor = open_executor(resolution)
        try:
            self._set_up()
        except BaseException:
            self.executor.close()
            raise

    # ---- what is fixed when the engine starts ----------------------------------------------------------------------

    def _set_up(self) -> None:
        args, config, plan = self.resolution.args, self.resolution.config, self.executor.rank.plan
        self.max_model_len = plan.max_model_len
        self.lanes = [make_lane(self.executor.rank, self.executor.depth) for _ in range(self.executor.lanes)]
        self.eos_token_ids = self._eos_token_ids()
        self.sampler = Sampler(config.vocab_size, self.executor.runner.device, args.seed)
        self.detokenizer = Detokenizer(self.tokenizer, self.eos_token_ids)
        self.grammars = Grammars(lambda: self.detokenizer.token_bytes(config.vocab_size), config.vocab_size)
        self.bad_words = BadWordLists(self.tokenizer, config.vocab_size)
        self.requests: dict[str, Request] = {}
        self.num_generated = 0
        self._rounds: deque[Round] = deque()
        self._ordinals = itertools.count()
        self._epoch = 0
        self.media = MediaReader(self.resolution, self.tokenizer, self.model)
        self._say_cache()

    @property
    def model(self) -> Any:
        """The module, or this process's part of it."""
        return self.executor.rank.model

    @property
    def load_report(self) -> LoadReport:
        """What became of every tensor, on this rank."""
        return self.executor.rank.load_report

    @property
    def cache(self) -> KVCache:
        """This rank's."""
        return self.executor.rank.cache

    @property
    def runner(self) -> Runner:
        """What computes this rank's part of a step."""
        return self.executor.runner

    @property
    def kv(self) -> KVManager:
        """The first lane's block tables."""
        return self.lanes[0].kv

    @property
    def scheduler(self) -> Scheduler:
        """The first lane's queue."""
        return self.lanes[0].scheduler

    def _eos_token_ids(self) -> frozenset[int]:
        """The union of what config, generation_config and tokenizer call the end (BEHAVIOUR C10)."""
        ids = stop_token_ids(self.resolution.config, self.tokenizer)
        self.resolution.trace.decide("engine", "stop tokens", list(ids), "config, generation_config and tokenizer")
        return frozenset(ids)

    def _say_cache(self) -> None:
        plan, usable, trace = self.executor.rank.plan, self.kv.pool.num_usable, self.resolution.trace
        if not plan.layout.groups:
            trace.decide("engine", "KV cache", "none", plan.budget.source)
            return
        per_sequence = plan.layout.blocks_for(self.max_model_len, self.scheduler.max_batched_tokens)
        tokens = int(usable / max(per_sequence, 1) * self.max_model_len)
        # On a CPU a page takes no memory before a token is written to it: see KVCache.
        taken = "up to {} as it fills" if self.runner.device.type == "cpu" else "{} reserved"
        text = taken.format(f"{plan.budget.bytes / 2**20:,.0f} MiB") + f", {usable:,} blocks, {tokens:,} tokens"
        trace.decide("engine", "KV cache", text, plan.budget.source)
        logger.info("KV cache: %s (%s)", text, plan.budget.source)

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
        check_tokens(token_ids, self.model)
        media = self._plan_media(prompt, token_ids)
        metrics = RequestMetrics(arrival_time=time.monotonic())
        ordinal = next(self._ordinals)
        bad_words = self.bad_words.automaton(params.bad_words)
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(request_id, index, len(token_ids), list(token_ids))
            sequence.reads_prefix_cache = params.prompt_logprobs is None or index > 0
            sequence.leader = sequences[0] if sequences else None
            sequence.media = media
            sequence.speculates = self.scheduler.num_drafts > 0 and media is None
            sequence.sampling = self.sampler.state(
                params, token_ids, sequence.output_ids,
                request_id=request_id, ordinal=ordinal, index=index, eos_token_ids=self.eos_token_ids,
                bad_words=bad_words,
                constraint=self.grammars.constraint(params.structured_outputs, sequence.output_ids),
            )  # fmt: skip
            sequence.text = self.detokenizer.stream(params, token_ids)
            sequences.append(sequence)
        self.requests[request_id] = Request(request_id, prompt.text, token_ids, params, sequences, metrics, stream)
        self._queue(sequences)

    def add_pooling_request(self, request_id: str, prompt: Prompt, params: PoolingParams) -> None:
        """Queue a request for what ``params.task`` says ("embed", "classify", "score"; None: the last hidden states).

        Raises:
            UsageError: it could never be served; nothing is queued.
        """
        if request_id in self.requests:
            raise UsageError(f"request id {request_id!r} is in use.")
        plan = plan_request(params, prompt, self.resolution, bool(self.executor.rank.plan.layout.groups))
        token_ids = fit_prompt(prompt, params, self.max_model_len)
        check_tokens(token_ids, self.model)
        sequence = Sequence(request_id, 0, len(token_ids), list(token_ids), pooling=plan)
        sequence.token_types, sequence.media = prompt.token_types, self._plan_media(prompt, token_ids)
        sequence.reads_prefix_cache = plan.reads_last_token
        metrics = RequestMetrics(arrival_time=time.monotonic())
        self.requests[request_id] = Request(request_id, prompt.text, token_ids, params, [sequence], metrics)
        self._queue([sequence])

    def _plan_media(self, prompt: Prompt, token_ids: list[int]) -> MediaPlan | None:
        if prompt.media is None:
            return None
        if len(token_ids) < len(prompt.token_ids):
            raise UsageError("truncate_prompt_tokens would tear images or audio out of the prompt; leave it unset.")
        return MediaPlan(prompt.media, token_ids, self.scheduler.max_batched_tokens)

    def _queue(self, sequences: list[Sequence]) -> None:
        """All of a request to one lane, since they share its prompt."""
        lane = choose_lane(self.lanes, sequences[0])
        for sequence in sequences:
            sequence.lane = lane
            self.lanes[lane].scheduler.add(sequence)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks; unknown ids are fine."""
        request = self.requests.pop(request_id, None)
        for sequence in request.sequences if request else ():
            self._finish(sequence)
            if sequence.pooling is not None:
                self.lanes[sequence.lane].given_up.append(sequence.request_id)

    def close(self) -> None:
        """End the processes that computed. Idempotent."""
        self.executor.close()

    def forget_prefixes(self) -> None:
        """What the prefix caches hold is not to be found any more."""
        self._epoch += 1  # what encoders made of images and audio neither
        for lane in self.lanes:
            lane.kv.pool.forget()

    def _finish(self, sequence: Sequence) -> None:
        self.lanes[sequence.lane].scheduler.finish(sequence)

    # ---- one step --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput | PoolingOutput]:
        """Compute one batch; the outputs of requests that finished, and of streaming ones that grew.

        Whatever is raised, requests that the caller does not abort go on with the next step.

        Raises:
            EngineError: logits or pooled values that are no numbers, or a cache too small for one sequence.
        """
        try:
            self._submit()
            if not self._rounds:
                return []
            return self._take(self._rounds.popleft(), self.executor.collect())
        except BaseException as error:
            self._rounds.clear()
            for lane in self.lanes:
                lane.scheduler.start_over()
            self.executor.drop()
            if isinstance(error, EngineError):
                # Rows that are no numbers would spread: zero times NaN is NaN, so that even a masked key is felt.
                self.forget_prefixes()
                self.executor.clear_cache()
            raise

    def _submit(self) -> None:
        """Begin as many rounds as may be under way at a time."""
        while len(self._rounds) < self.executor.depth:
            scheduled = [lane.scheduler.schedule() for lane in self.lanes]
            if not any(scheduled):
                return
            this: Round = [
                (items, self._batch(lane, items)) if items else None
                for lane, items in zip(self.lanes, scheduled, strict=True)
            ]
            self._rounds.append(this)
            for lane, items in zip(self.lanes, scheduled, strict=True):
                if items:
                    lane.given_up = []
                under_way(items, True)
                for item in items:
                    self.requests[item.sequence.request_id].mark_scheduled()
            self.executor.submit([None if part is None else part[1] for part in this])

    def _batch(self, lane: Lane, items: list[Scheduled]) -> Batch:
        return make_batch(items, lane.kv, prompt_rows(items, self.requests), lane.given_up, self._epoch)

    def _take(self, this: Round, outputs: list[BatchOutput | None]) -> list[RequestOutput | PoolingOutput]:
        """What a round brought, lane by lane."""
        sampled: list[Sequence] = []
        logits: list[torch.Tensor] = []
        guesses: list[Guess] = []
        pooled: dict[str, torch.Tensor] = {}
        for part, output in zip(this, outputs, strict=True):
            if part is None or output is None:
                continue
            items, batch = part
            step = StepOutput(items, batch, output)
            # A request that was given up meanwhile has no use for it.
            items = [item for item in items if item.sequence.in_flight]
            step.take_prompt_logprobs()
            for item in items:
                self._advance(item.sequence, item.num_new - item.num_drafts)
                item.sequence.drafts_next = item.sequence.speculates
            under_way(items, False)
            guesses += step.guesses
            for guess in step.guesses:
                guess.sequence.num_drafts += len(guess.tokens)
            pooled |= {name: step.pooled[name] for item in items if (name := item.sequence.request_id) in step.pooled}
            found = [
                (row, sequence)
                for row, sequence in zip(step.rows, step.sampled, strict=True)
                if sequence.status is Status.RUNNING
            ]
            if found and step.logits is not None:
                sampled += [sequence for _, sequence in found]
                rows = [row for row, _ in found]
                logits.append(step.logits if len(rows) == len(step.logits) else step.logits[rows])
        # What may raise comes before any request is done with: no output is lost that was taken already.
        check_pooled(pooled)
        taken = self._take_tokens(sampled, logits)
        taken += self._take_guesses(guesses)
        return [*taken, *(self._finish_pooling(*item) for item in pooled.items())]

    def _advance(self, sequence: Sequence, count: int) -> None:
        sequence.num_computed += count
        self.lanes[sequence.lane].kv.publish(sequence)

    def _take_guesses(self, guesses: list[Guess]) -> list[RequestOutput]:
        """Draw on where the token drawn is the one that was guessed."""
        outputs: list[RequestOutput] = []
        while guesses := [guess for guess in guesses if guess.tokens and guess.right]:
            for guess in guesses:
                guess.sequence.num_accepted += 1
            try:
                drawn = self._take_tokens([g.sequence for g in guesses], [torch.stack([g.logits[0] for g in guesses])])
            except EngineError:
                break  # outputs that were taken are not lost; the next step computes these tokens again, and says so
            outputs += drawn
            for guess in guesses:
                if guess.sequence.status is Status.RUNNING:
                    self._advance(guess.sequence, 1)
            guesses = [guess.rest() for guess in guesses]
        return outputs

    def _finish_pooling(self, request_id: str, result: torch.Tensor) -> PoolingOutput:
        request = self.requests.pop(request_id)
        [sequence] = request.sequences
        sequence.pooled = result
        self._finish(sequence)
        return request.pooling_output()

    def _take_tokens(self, sampled: list[Sequence], logits: list[torch.Tensor]) -> list[RequestOutput]:
        if not sampled:
            return []
        rows = logits[0] if len(logits) == 1 else torch.cat(logits)
        with torch.inference_mode():
            drawn = self.sampler.sample(rows, [self._state(sequence) for sequence in sampled])
        changed: dict[str, Request] = {}
        for row, sequence in enumerate(sampled):
            token_id, logprobs = drawn.token_ids[row], drawn.logprobs[row]
            request = self.requests[sequence.request_id]
            if row in drawn.endings:
                self._end_without_token(sequence, drawn.endings[row])
                changed[request.id] = request
                continue
            request.mark_token()
            sequence.append(token_id)
            self.num_generated += 1
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
                request.show_logprobs(sequence, self.detokenizer)
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
        complete = reason is None and self._state(sequence).finished
        if reason is None and (complete or full or len(sequence.output_ids) == request.params.max_tokens):
            last = sequence.text.finish()
            reason, stop = last.finish_reason or ("stop" if complete else "length"), last.stop_reason
        if reason is not None:
            sequence.finish_reason, sequence.stop_reason = reason, stop
            self._finish(sequence)

    def _end_without_token(self, sequence: Sequence, ending: Ending) -> None:
        """What the output must look like is complete, or cannot be reached: only this sequence ends."""
        assert sequence.text is not None, "a sequence in the engine has its text stream"
        sequence.text.finish()
        sequence.finish_reason, sequence.stop_reason = ending
        if ending.finish_reason == "error":
            logger.warning("request %s: %s", sequence.request_id, ending.stop_reason)
        self._finish(sequence)
