"""What LangChain's classes make of a server: one JSON object on standard output. Runs in the clients' environment."""

import json
import sys
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=14)


def main() -> None:
    given = json.loads(sys.argv[1])
    common: dict[str, Any] = {"base_url": given["base_url"], "api_key": "unused", "max_retries": 0, "model": "smollm2"}
    chat = ChatOpenAI(**common, temperature=0, max_completion_tokens=80)
    short = ChatOpenAI(**common, temperature=0, max_completion_tokens=12, stream_usage=True)
    question = given["question"]
    got: dict[str, Any] = {"whole": short.invoke(question).content}

    chunks = list(short.stream(question))
    got["streamed"] = "".join(str(chunk.content) for chunk in chunks)
    got["usage"] = next(chunk.usage_metadata for chunk in reversed(chunks) if chunk.usage_metadata)
    got["batch"] = [answer.content for answer in short.batch([question] * 3)]
    likely = ChatOpenAI(**common, temperature=0, max_completion_tokens=3, logprobs=True, top_logprobs=2)
    got["logprobs"] = len(likely.invoke(question).response_metadata["logprobs"]["content"])

    for method in ("json_schema", "function_calling"):
        got[method] = chat.with_structured_output(GetWeather, method=method).invoke(question).model_dump()
    forced = chat.bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    called = forced.invoke(question)
    got["call"] = called.tool_calls[0]["args"]
    pieces = None
    for chunk in forced.stream(question):
        pieces = chunk if pieces is None else pieces + chunk
    got["streamed_call"] = pieces.tool_calls[0]["args"]
    told = [("user", question), called, ToolMessage("Sunny", tool_call_id=called.tool_calls[0]["id"])]
    got["after_call"] = str(chat.bind_tools([GetWeather]).invoke(told).content)

    complete = OpenAI(**common, temperature=0, max_tokens=8)
    got["completion"] = complete.invoke(given["prompt"])
    got["completion_streamed"] = "".join(complete.stream(given["prompt"]))
    got["generations"] = [one[0].text for one in complete.generate([given["prompt"], question]).generations]

    embed = OpenAIEmbeddings(**{**common, "model": "minilm"}, check_embedding_ctx_length=False)
    got["vectors"] = embed.embed_documents(given["texts"])
    got["query"] = embed.embed_query(given["texts"][0])
    print(json.dumps(got))


main()
