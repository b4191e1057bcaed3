"""What a request's tools mean for its answer: how calls are found, and what is asked of the model to force one."""

from __future__ import annotations

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_server.answers.tool_calls import ToolReader
from modelbay_server.schemas.chat import ChatBody
from modelbay_server.tool_forms import ToolForm


def with_tools(
    body: ChatBody, params: SamplingParams, form: ToolForm | None
) -> tuple[ToolReader | None, SamplingParams]:
    """How calls are found in the answer, if they are looked for, and ``params`` with what that takes.

    Args:
        form: how the model writes calls, if that is known.

    Raises:
        UsageError: a call is to be forced and cannot be.
    """
    offered, forced = body.offered_tools, body.forced_functions
    if not offered:
        return None, params
    if form is None:
        if forced is not None:
            raise UsageError(
                "a call of a tool cannot be forced: the model's chat template does not say in a known way how calls "
                "are written.",
                hint="If the model writes them in one of the known forms, name it with --tool-call-parser.",
            )
        return None, params
    names, many = [tool["function"]["name"] for tool in offered], body.parallel_tool_calls is not False
    if forced is not None:
        many = many and body.tool_choice == "required"
        asked = form.forced(forced, many=many)
        params = params.replace(structured_outputs={"grammar": asked.grammar})
        return ToolReader(form, names, asked.prefix, many, forced=True), params
    if form.opening_is_special and body.skip_special_tokens is None:
        params = params.replace(skip_special_tokens=False)
    return ToolReader(form, names, many=many), params
