"""What `LLM.embed`, `classify`, `score`, `encode` were given, checked and tokenized before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from modelbay.errors import UsageError
from modelbay_runtime.engine.outputs import EmbeddingOutput, ScoringOutput
from modelbay_runtime.engine.prompts import Prompt, PromptLike, fit_prompt, listed
from modelbay_runtime.pooling.inputs import (
    DOCUMENT,
    QUERY,
    check_takes_texts,
    check_truncation,
    numbered,
    prompt_for,
    prompt_text,
    read_pair,
    read_text,
    tokens_before,
)
from modelbay_runtime.pooling.plan import assert_task, plan_request
from modelbay_runtime.sampling_params import PoolingParams

if TYPE_CHECKING:
    from modelbay_runtime.llm import LLM

Given = tuple[list[Prompt], list[PoolingParams]]


def encode_prompts(llm: LLM, prompts: PromptLike | Sequence[PromptLike], params: PoolingParams) -> list[Prompt]:
    """For hidden states."""
    items = listed(prompts)
    _check_shared(llm, params, None)
    return _read(llm, items, [params] * len(items), "")


def embed_prompts(
    llm: LLM,
    prompts: PromptLike | Sequence[PromptLike],
    params: PoolingParams | Sequence[PoolingParams] | None,
    *,
    prompt_name: str | None,
    prompt: str | None,
) -> Given:
    """Raises:
    UsageError: naming the first prompt that cannot be served by its index.
    """
    assert_task(llm.resolution.task, "embed")
    items = listed(prompts)
    before = prompt_text(llm.resolution.pooling, prompt_name, prompt)
    _check_shared(llm, params, "embed")
    asked = prompt_name is not None or prompt is not None
    wanted = _params(params, "embed", len(items))
    return _read(llm, items, wanted, before, only_texts=not asked), wanted


def check_embeds(
    llm: LLM, params: PoolingParams, *, prompt_name: str | None = None, prompt: str | None = None
) -> PoolingParams:
    """Whatever would be refused of every text.

    Returns: the parameters, with their task.

    Raises:
        UsageError: the model does not embed, or not with these parameters or this prompt.
    """
    assert_task(llm.resolution.task, "embed")
    prompt_text(llm.resolution.pooling, prompt_name, prompt)
    [wanted] = _params(params, "embed", 1)
    _check_shared(llm, wanted, "embed", texts=True)
    return wanted


def classify_prompts(
    llm: LLM, prompts: PromptLike | Sequence[PromptLike], params: PoolingParams | Sequence[PoolingParams] | None
) -> Given:
    """As `embed_prompts`, for classes."""
    assert_task(llm.resolution.task, "classify")
    items = listed(prompts)
    _check_shared(llm, params, "classify")
    wanted = _params(params, "classify", len(items))
    return _read(llm, items, wanted, ""), wanted


def paired(query: str | Sequence[str], documents: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """A query for each document.

    Raises:
        UsageError: not texts, or their numbers do not fit.
    """
    queries, texts = _texts(query), _texts(documents)
    if not texts or len(queries) not in (1, len(texts)):
        raise UsageError(f"{len(queries)} queries and {len(texts)} documents: give one query, or one for each.")
    return queries * len(texts) if len(queries) == 1 else queries, texts


def _texts(given: Any) -> list[str]:
    """A mapping or a set is iterable too, and its keys, or their order, are not what was meant."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or isinstance(texts, bytes | bytearray):
        raise UsageError(f"queries and documents are texts, or lists of them, got {type(given).__name__}.")

    def check(text: Any) -> str:
        if not isinstance(text, str):
            raise UsageError(f"queries and documents are texts, got {type(text).__name__}.")
        return text

    return numbered(texts, check)


def check_scores(llm: LLM, params: PoolingParams | None) -> PoolingParams:
    """Whatever would be refused of every pair.

    Returns: the parameters, with their task.

    Raises:
        UsageError: the model makes no scores, or not with these parameters.
    """
    spec, task = llm.resolution.pooling, llm.resolution.task
    if task != "classify":
        assert_task(task, "embed")
        if isinstance(params, PoolingParams) and params.task is not None:
            params = dataclasses.replace(params, task=None)
    elif spec is not None and spec.num_labels != 1:
        raise UsageError(
            f"a score is made by a classifier with one label, and this one has {spec.num_labels}.",
            hint="Use classify.",
        )
    check_takes_texts(spec)
    kind = "score" if task == "classify" else "embed"
    [wanted] = _params(params, kind, 1)
    _check_shared(llm, wanted, kind, texts=True)
    return wanted


def query_prompt(llm: LLM, prompt_name: str | None, prompt: str | None) -> str:
    """What a cross-encoder gets before each query, as `prompt_text` says; "" for a model that embeds.

    Raises:
        UsageError: see `prompt_text`; or one was named for a model that embeds.
    """
    if llm.resolution.task == "classify":
        return prompt_text(llm.resolution.pooling, prompt_name, prompt)
    if prompt_name is not None or prompt is not None:
        raise UsageError(
            "prompt and prompt_name are for cross-encoders: a model that embeds has a prompt for each side.",
            hint="Use embed, once for the queries and once for the documents.",
        )
    return ""


def score_prompts(
    llm: LLM, queries: list[str], documents: list[str], params: PoolingParams | None, before: str
) -> Given:
    """Pairs for a cross-encoder.

    Args:
        before: what is put before each query: see `query_prompt`.

    Raises:
        UsageError: the classifier has more than one label.
    """
    spec, config, engine = llm.resolution.pooling, llm.resolution.config, llm.engine
    assert spec is not None, "a classifier has a pooling spec"
    wanted = check_scores(llm, params)
    prompts = numbered(
        list(zip(queries, documents, strict=True)),
        lambda pair: read_pair(
            pair[0], pair[1], engine.tokenizer, config.vocab_size, wanted, engine.max_model_len,
            num_types=config.get("type_vocab_size"), before=before, lower=spec.lower_case,
        ),
    )  # fmt: skip
    _check(llm, prompts, [wanted] * len(prompts))
    return prompts, [wanted] * len(prompts)


def check_query(llm: LLM, query: str, params: PoolingParams | None, before: str) -> None:
    """Raises:
    UsageError: this query cannot be served, whatever the document.
    """
    wanted = check_scores(llm, params)
    if llm.resolution.task != "classify":
        _check(llm, [_one(llm, query, wanted, prompt_for(llm.resolution.pooling, QUERY))], [wanted])
    elif query:  # what an empty one makes is the document's affair
        score_prompts(llm, [query], [""], params, before)


def bi_encoder_prompts(
    llm: LLM, queries: list[str], documents: list[str], params: PoolingParams | None
) -> tuple[Given, list[tuple[int, int]]]:
    """Each different text once, and for every pair the places of its two.

    Raises:
        UsageError: naming the first pair that cannot be served by its index.
    """
    wanted = check_scores(llm, params)
    spec = llm.resolution.pooling
    before = (prompt_for(spec, QUERY), prompt_for(spec, DOCUMENT))
    places: dict[tuple[int, str], int] = {}
    prompts: list[Prompt] = []

    def place(side: int, text: str) -> int:
        if (side, text) not in places:
            found = _one(llm, text, wanted, before[side])
            _check(llm, [found], [wanted])
            places[side, text] = len(prompts)
            prompts.append(found)
        return places[side, text]

    pairs = numbered(list(zip(queries, documents, strict=True)), lambda pair: (place(0, pair[0]), place(1, pair[1])))
    return (prompts, [wanted] * len(prompts)), pairs


def cosines(outputs: Sequence[EmbeddingOutput], places: Sequence[tuple[int, int]]) -> list[ScoringOutput]:
    """The cosine of each pair of embeddings."""
    vectors = torch.nn.functional.normalize(torch.tensor([output.embedding for output in outputs]), dim=-1)
    scores = (vectors[[left for left, _ in places]] * vectors[[right for _, right in places]]).sum(-1).tolist()
    found = []
    for (left, right), score in zip(places, scores, strict=True):
        query, document = outputs[left], outputs[right]
        ids = [*query.prompt_token_ids, *document.prompt_token_ids]
        found.append(ScoringOutput(query.request_id, query.prompt, ids, score, document.metrics))
    return found


def _params(params: PoolingParams | Sequence[PoolingParams] | None, task: str, count: int) -> list[PoolingParams]:
    """One for each prompt, each with its task."""
    given = PoolingParams() if params is None else params
    several = [given] * count if isinstance(given, PoolingParams) else given
    if not isinstance(several, Sequence) or not all(isinstance(item, PoolingParams) for item in several):
        raise UsageError(f"pooling parameters are PoolingParams, or a list of them, got {params!r}.")
    if len(several) != count:
        raise UsageError(f"{count} prompts and {len(several)} pooling parameters: give one, or one for each.")
    wrong = next((item.task for item in several if item.task not in (None, task)), None)
    if wrong is not None:
        raise UsageError(f"{task} was called with pooling parameters for the task {wrong}.")
    return [dataclasses.replace(item, task=task) for item in several]


def _read(
    llm: LLM, items: list[Any], params: Sequence[PoolingParams], before: str, *, only_texts: bool = False
) -> list[Prompt]:
    """Args:
    only_texts: whether ``before`` is left out where an item is no text.
    """
    numbers = iter(params)

    def read(item: Any) -> Prompt:
        return _one(llm, item, next(numbers), before if _is_text(item) or not only_texts else "")

    prompts = numbered(items, read)
    _check(llm, prompts, params)
    return prompts


def _one(llm: LLM, item: Any, params: PoolingParams, before: str) -> Prompt:
    engine, spec = llm.engine, llm.resolution.pooling
    if _is_text(item) and params.task is not None:
        check_takes_texts(spec)
    prompt = read_text(
        item, engine.tokenizer, llm.resolution.config.vocab_size, params, engine.max_model_len,
        before=before, lower=spec is not None and spec.lower_case,
    )  # fmt: skip
    if before and spec is not None and not spec.include_prompt:
        skipped = tokens_before(engine.tokenizer, before, lower=spec.lower_case)
        return dataclasses.replace(prompt, not_pooled=skipped)
    return prompt


def _is_text(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, Mapping) and isinstance(item.get("prompt"), str))


def _check_shared(llm: LLM, params: Any, task: str | None, *, texts: bool = False) -> None:
    """What is wrong with one request's parameters whatever its prompt, so that no prompt is blamed for it.

    Args:
        texts: whether all prompts are texts; token ids are cut to any length.

    Raises:
        UsageError: see `make_plan`, `check_truncation`.
    """
    if not isinstance(params, PoolingParams):
        return  # one for each prompt, or none, or what `_params` refuses
    if task is not None:
        [params] = _params(params, task, 1)
    plan_request(params, Prompt([]), llm.resolution, _keeps(llm))
    if texts:
        check_truncation(llm.engine.tokenizer, params, llm.engine.max_model_len, pair=task == "score")


def _keeps(llm: LLM) -> bool:
    return bool(llm.engine.executor.rank.plan.layout.groups)


def _check(llm: LLM, prompts: list[Prompt], params: Sequence[PoolingParams]) -> None:
    """Everything that would be refused when a request is queued.

    Raises:
        UsageError: naming the prompt by its index.
    """
    keeps = _keeps(llm)

    def check(pair: tuple[Prompt, PoolingParams]) -> None:
        plan_request(pair[1], pair[0], llm.resolution, keeps)
        fit_prompt(pair[0], pair[1], llm.engine.max_model_len)

    numbered(list(zip(prompts, params, strict=True)), check)
