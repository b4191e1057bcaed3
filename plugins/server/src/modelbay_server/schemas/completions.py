"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_server.schemas.common import Prompts, SamplingBody, check_total


class CompletionBody(SamplingBody):
    """Continue one prompt or several.

    ``max_tokens`` 0 with ``echo`` gives the prompt back and nothing more, with its log-probabilities if they were asked
    for.
    """

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = Field(True, description="Whether the tokenizer's BOS is put before texts.")

    @property
    def only_echo(self) -> bool:
        return self.max_tokens == 0

    def params(self) -> SamplingParams:
        """Raises UsageError: what the fields say together makes no sense, or is not offered."""
        if self.suffix:
            raise UsageError("suffix is not offered: there is no text put between two others.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UsageError(f"best_of must be the same as n ({self.n or 1}), got {self.best_of}.")
        if self.only_echo and not self.echo:
            raise UsageError("max_tokens is 0, so nothing would come back; with echo the prompt would.")
        check_total(len(self.prompt), self.n or 1)
        more = {} if self.max_tokens is None else {"max_tokens": max(self.max_tokens, 1)}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs
        return self.sampling(logprobs=self.logprobs, **more)
