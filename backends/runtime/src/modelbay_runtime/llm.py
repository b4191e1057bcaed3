"""`LLM`: a model, resolved, loaded and ready. Names and behaviour as in vLLM, so that an import is what changes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from modelbay.args import EngineArgs
from modelbay.errors import EngineError, UsageError
from modelbay.resolve import Resolution, resolve
from modelbay.weights.accounting import LoadReport
from modelbay_runtime.engine.chat_arguments import chat_arguments
from modelbay_runtime.engine.engine import Engine
from modelbay_runtime.engine.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    HiddenStatesOutput,
    PoolingOutput,
    RequestOutput,
    ScoringOutput,
)
from modelbay_runtime.engine.prompts import Prompt, PromptLike, PromptRoom, listed, read_prompt, read_prompts
from modelbay_runtime.multimodal.messages import render_messages
from modelbay_runtime.pooling import calls
from modelbay_runtime.pooling.plan import assert_generates
from modelbay_runtime.progress import progress_bar
from modelbay_runtime.sampling_params import PoolingParams, SamplingParams

Result = TypeVar("Result")
Message = Mapping[str, Any]


class LLM:
    """Load a model and generate with it.

    Args:
        model: a directory, a file of a format that carries everything (``.gguf``), or a hub id.
        **kwargs: the engine arguments, see `modelbay.args.EngineArgs`.

    Several threads may share one: their requests run in the same batches.

    Raises:
        ModelbayError: whatever stage could not go on; its message says what to do.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        self._open(resolve(model, **kwargs))

    @classmethod
    def of(cls, resolution: Resolution) -> LLM:
        """Load what `modelbay.resolve` has resolved, for whoever looks at the resolution before weights are read.

        Raises:
            ModelbayError: see the class.
        """
        llm = cls.__new__(cls)
        llm._open(resolution)
        return llm

    def _open(self, resolution: Resolution) -> None:
        self.resolution = resolution
        self._engine: Engine | None = Engine(resolution)
        self._ids = itertools.count()
        self._arrived: dict[str, RequestOutput | PoolingOutput] = {}
        # Whoever holds it may touch the engine. A thread that waits for it finds its outputs among the arrived ones.
        self._lock = threading.RLock()
        self._stepping = False
        self._left: list[str] = []  # requests given up in the middle of a step, when a stream was garbage

    @property
    def engine(self) -> Engine:
        """The engine behind this model.

        Raises:
            UsageError: after `close`.
        """
        if self._engine is None:
            raise UsageError("this LLM was closed.")
        return self._engine

    @property
    def load_report(self) -> LoadReport:
        """What became of every tensor of the checkpoint."""
        return self.engine.load_report

    def get_tokenizer(self) -> Any:
        """The tokenizer, of the type that Transformers returns."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request that says nothing gets: the model's generation_config.json over the defaults."""
        return SamplingParams().with_defaults(self.resolution.config.generation)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, batched; results in the order of the prompts.

        Args:
            prompts: a text, ``{"prompt": text}``, ``{"prompt_token_ids": [int]}``, or a list of them; a mapping may
                have ``"multi_modal_data": {"image": …, "audio": …}`` for the placeholders in it.
            sampling_params: for all, or one for each prompt.

        Raises:
            UsageError: a prompt or a parameter that cannot be served; nothing runs then.
            EngineError: the model gave logits that are no numbers.
        """
        items = listed(prompts)
        config = self.resolution.config
        wanted = self._params_for(items, sampling_params)
        rooms = [self.prompt_room(params) for params in wanted]
        texts = read_prompts(items, self.engine.tokenizer, config.vocab_size, self.engine.media, rooms)
        return self._generate(texts, wanted, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations: lists of ``{"role": …, "content": …}``, rendered by the model's chat template.

        ``content`` is a text or a list of parts: text, images and audio as OpenAI or Transformers write them.
        ``chat_template_kwargs`` are further variables that the template reads; the arguments here may be among them.
        """
        if not messages:
            raise UsageError("a conversation has at least one message.")
        if not isinstance(messages, Sequence):
            raise UsageError(f"messages must be a list, got {type(messages).__name__}.")
        conversations: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        wanted = self._params_for(conversations, sampling_params)
        own = {
            "chat_template": chat_template,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        arguments = chat_arguments(own, chat_template_kwargs, self.engine.tokenizer, self.engine.media)
        prompts = [
            self.render(conversation, prompt_room=self.prompt_room(params), **arguments)
            for conversation, params in zip(conversations, wanted, strict=True)
        ]
        return self._generate(prompts, wanted, use_tqdm)

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[HiddenStatesOutput]:
        """The last hidden states of prompts, one row [H] per token; encoders and decoders alike.

        Raises:
            UsageError: a prompt that cannot be served, or a parameter that hidden states have no use for; nothing
                runs then.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise UsageError(f"pooling parameters are PoolingParams, got {params!r}.")
        if params.task is not None:
            raise UsageError(f"encode returns hidden states as they are: task={params.task} would have no effect.")
        return self._pool(calls.encode_prompts(self, prompts, params), params, use_tqdm)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """One vector for each prompt, pooled as request, ``pooler_config`` and checkpoint say, in this order.

        Args:
            prompts: as for `generate`.
            pooling_params: for all, or one for each prompt.
            prompt_name: which of the model's prompts (``config_sentence_transformers.json``) is put before each text;
                its default one if not given.
            prompt: a text to put before each text instead; "" for none.

        Raises:
            UsageError: the model does not embed, or a prompt cannot be served; its index is named, and nothing runs.
        """
        given = calls.embed_prompts(self, prompts, pooling_params, prompt_name=prompt_name, prompt=prompt)
        return self._pool(*given, use_tqdm)

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[ClassificationOutput]:
        """The probabilities of a classifier's labels for each prompt; its declared activation is applied once.

        Raises:
            UsageError: the model does not classify, or a prompt cannot be served; nothing runs then.
        """
        return self._pool(*calls.classify_prompts(self, prompts, pooling_params), use_tqdm)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringOutput]:
        """How well each document answers the query: a cross-encoder's score of the pair (a classifier with one label),
        or the cosine of the two embeddings (a model that embeds).

        Args:
            query: one for all documents, or one for each.
            prompt_name, prompt: what a cross-encoder gets before each query, as for `embed`.

        Raises:
            UsageError: the model does neither, or a text cannot be served; nothing runs then.
        """
        queries, texts = calls.paired(query, documents)
        before = calls.query_prompt(self, prompt_name, prompt)
        if self.resolution.task == "classify":
            return self._pool(*calls.score_prompts(self, queries, texts, pooling_params, before), use_tqdm)
        given, places = calls.bi_encoder_prompts(self, queries, texts, pooling_params)
        return calls.cosines(self._pool(*given, use_tqdm), places)

    def _pool(
        self, prompts: list[Prompt], params: PoolingParams | Sequence[PoolingParams], use_tqdm: bool
    ) -> list[Any]:
        """Longest first: sequences of one length are computed together."""
        wanted = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].token_ids))
        outputs = self._run(
            [prompts[place] for place in order],
            lambda request_id, i: self.engine.add_pooling_request(request_id, prompts[order[i]], wanted[order[i]]),
            use_tqdm,
        )
        placed = dict(zip(order, outputs, strict=True))
        return [placed[place] for place in range(len(prompts))]

    def stream(
        self, prompt: PromptLike | Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """One prompt's outputs as they grow, each with the whole text so far. Closing the iterator aborts it."""
        assert_generates(self.resolution)
        [params] = self._params_for([prompt], sampling_params)
        if not isinstance(prompt, Prompt):
            vocab_size, room = self.resolution.config.vocab_size, self.prompt_room(params)
            prompt = read_prompt(prompt, self.engine.tokenizer, vocab_size, self.engine.media, room)
        request_id = str(next(self._ids))
        with self._lock:
            self.engine.add_request(request_id, prompt, params, stream=True)
        try:
            finished = False
            while not finished:
                output = self._next([request_id])[0]
                finished = output.finished
                yield output
        finally:
            self._abort([request_id])

    def prompt_room(self, params: SamplingParams | PoolingParams) -> PromptRoom:
        """How long the prompt of a request with these parameters may be."""
        return PromptRoom.of(params, self.engine.max_model_len)

    def render(self, messages: Sequence[Message], *, untrusted: bool = False, **kwargs: Any) -> Prompt:
        """The prompt that a conversation becomes.

        ``untrusted``: the messages come over a network, so that they name no files but those that
        ``allowed_local_media_path`` allows. ``prompt_room``: of a conversation that is far too long for it no more is
        encoded than decides what becomes of it.
        """
        engine = self.engine
        if engine.tokenizer is None:
            raise UsageError("chat needs a tokenizer, and this model was loaded without one.")
        vocab_size = self.resolution.config.vocab_size
        return render_messages(messages, engine.tokenizer, vocab_size, engine.media, untrusted=untrusted, **kwargs)

    def apply_model(self, fn: Callable[[Any], Result]) -> list[Result]:
        """Run ``fn`` on the module in every worker: one result for each. What the prefix cache holds is forgotten,
        since ``fn`` may have changed the weights it was computed with."""
        with self._lock:
            try:
                return self.engine.executor.apply(fn)
            finally:
                self.engine.forget_prefixes()

    def close(self) -> None:
        """Give the model's memory back, and end the processes that held parts of it. Idempotent."""
        with self._lock:  # not in the middle of another thread's step
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _params_for(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
            raise UsageError(f"sampling parameters are SamplingParams, or a list of them, got {params!r}.")
        if len(params) != len(prompts):
            raise UsageError(
                f"{len(prompts)} prompts and {len(params)} sampling parameters: give one, or one for each."
            )
        return list(params)

    def _generate(self, prompts: list[Prompt], wanted: Sequence[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        assert_generates(self.resolution)
        return self._run(
            prompts, lambda request_id, i: self.engine.add_request(request_id, prompts[i], wanted[i]), use_tqdm
        )

    def _run(self, prompts: list[Prompt], add: Callable[[str, int], None], use_tqdm: bool) -> list[Any]:
        """Queue every prompt with ``add(request id, index)``, step until all are done, results in order."""
        ids = [str(next(self._ids)) for _ in prompts]
        done: dict[str, Any] = {}
        try:
            for index, request_id in enumerate(ids):
                with self._lock:
                    add(request_id, index)
            with progress_bar(len(prompts), "Requests", use_tqdm) as bar:
                while len(done) < len(ids):
                    for output in self._next(ids):
                        done[output.request_id] = output
                        bar.update()
        finally:
            # After an error or Ctrl-C nothing of this call is left to run into the next one.
            self._abort(ids)
        return [done[request_id] for request_id in ids]

    def _next(self, ids: Sequence[str]) -> list[Any]:
        """Step until some of these requests have outputs. Outputs of others wait for whoever asks for them: several
        streams, and calls of `generate` between them, may take turns on one engine."""
        while True:
            with self._lock:  # for one step at a time, so that another thread's requests can join the next one
                arrived = [self._arrived.pop(request_id) for request_id in ids if request_id in self._arrived]
                if arrived:
                    return arrived
                if not any(self.engine.has_request(request_id) for request_id in ids):
                    raise EngineError(f"request {', '.join(ids)} was aborted.", request_ids=ids)
                self._step()

    def _step(self) -> None:
        self._stepping = True
        try:
            for output in self.engine.step():
                self._arrived[output.request_id] = output
        finally:
            self._stepping = False
            left, self._left = self._left, []
            self._abort(left)

    def _abort(self, ids: Sequence[str]) -> None:
        with self._lock:
            if self._stepping:  # a collected stream, in the very thread that steps: its blocks are in use
                self._left.extend(ids)
                return
            for request_id in ids:
                self._arrived.pop(request_id, None)
                if self._engine is not None:
                    self._engine.abort(request_id)


def _signature() -> inspect.Signature:
    """`LLM`'s own, from the one table of arguments."""
    parameters = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str")]
    for entry in dataclasses.fields(EngineArgs):
        if entry.name != "model":
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(entry.name, kind, default=entry.default, annotation=entry.type))
    return inspect.Signature(parameters)


LLM.__signature__ = _signature()  # type: ignore[attr-defined]
