"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from modelbay_server.schemas.chat import Message, Tool
from modelbay_server.schemas.common import Body, TokenIds


class TokenizeBody(Body):
    """Either a ``prompt`` or ``messages``."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = Field(None, description="True for a prompt, unless it says otherwise.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is needed, and not both")
        return self


class DetokenizeBody(Body):
    tokens: TokenIds
