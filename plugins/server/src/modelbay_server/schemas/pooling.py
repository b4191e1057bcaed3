"""The bodies of /v1/embeddings, /rerank and /score."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from modelbay_runtime.sampling_params import PoolingParams
from modelbay_server.schemas.common import MAX_PROMPTS, Body, Prompts

Text = Annotated[str, Field(min_length=1)]


class EmbeddingBody(Body):
    """One vector for each text."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = Field(None, description="Which of the model's own prompts is put before each text.")
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = Field(None, description="Scale to length 1; the model's own way if not said.")

    def params(self) -> PoolingParams:
        return PoolingParams(
            task="embed",
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class RerankBody(Body):
    """Documents in the order in which they fit a query."""

    query: Text
    documents: Annotated[list[Text | dict[str, Any]], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="How many to return; 0 or nothing for all.")
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None


class ScoreBody(Body):
    """How well pairs of texts fit: one to one, one to many, or many to many in pairs."""

    text_1: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(
        validation_alias=AliasChoices("text_1", "queries")
    )
    text_2: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items")
    )
    truncate_prompt_tokens: int | None = None
