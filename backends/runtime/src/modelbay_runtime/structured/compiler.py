"""A specification becomes an automaton of the library llguidance, or a `UsageError`.

The library bounds its own work ("fuel") and says what it does not support, with two exceptions that this module closes:
it recurses as deep as a grammar's rules refer to each other, so it runs on a stack that holds the deepest chain that
`spec.MAX_CHARS` can spell; and it is not given longer than `MAX_SECONDS`.

The library would rather choose a canonical tokenisation itself wherever the text is forced. That is off: the mask says
what the grammar allows, nothing else, so it needs no encoder and agrees with whatever else a request forbids.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from modelbay.errors import UsageError
from modelbay_runtime.structured.expressions import check_expression
from modelbay_runtime.structured.numbers import check_numbers, inline_schemas, parse_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SECONDS = 5.0
#: Of virtual memory: pages that the compiler does not reach are never touched.
_STACK_BYTES = 256 * 2**20
_starting = threading.Lock()  # the size of the next thread's stack is a setting of the process
#: About 1 to 2 kB each. The library's own default would let one hostile expression take half a gigabyte.
_MAX_LEXER_STATES = 50_000
#: Of an object's properties, each of which could come next: compiling grows with their square.
_MAX_OPTIONAL = 490
#: Continuations that are looked at for one byte. A grammar of `spec.MAX_CHARS` cannot spell more alternatives, so that
#: the library's own default, a tenth of this, would only let some fail after they had begun.
_MAX_ITEMS = 20_000
#: What the expressions of a grammar may cost to read: several times what the longest list of choices does.
_LEXER_FUEL = 400_000
_WRAPPER = '%llguidance {"no_forcing": true}\nstart: @output'
#: What may stand between the parts of a JSON text. It ends, because small models are fond of white space.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


def import_library() -> Any:
    """The module llguidance.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            f"structured_outputs needs the library llguidance, which is not usable here ({error}).",
            hint="pip install 'modelbay-runtime[structured]'",
        ) from error
    return llguidance


def compile_grammar(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """The automaton at its beginning, to be copied for each sequence.

    Args:
        kind, text: `StructuredOutputs.key`.
        tokenizer: the vocabulary's bytes.

    Raises:
        UsageError: it is invalid, not supported, too large, or allows no output at all.
    """
    return _on_large_stack(lambda: _compile(kind, text, tokenizer), kind)


def _compile(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    library = import_library()
    try:
        grammar = {"grammars": [{"lark_grammar": _WRAPPER}, {"name": "output", **_SOURCES[kind](text)}]}
        source = json.dumps(grammar)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"structured_outputs: the {_NAMES[kind]} cannot be used: {_first_line(error)}.") from error
    limits = library.LLParserLimits(
        max_items_in_row=_MAX_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        initial_lexer_fuel=_LEXER_FUEL,
        verbose_errors=False,
    )
    matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise UsageError(f"structured_outputs: the {_NAMES[kind]} cannot be used: {_first_line(matcher.get_error())}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise UsageError(f"structured_outputs: no output can begin to match the {_NAMES[kind]}: {reason_of(matcher)}.")
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher that is in error cannot go on."""
    reason = _first_line(matcher.get_error())
    if reason.startswith("NoExtension"):
        return "nothing is allowed next, or no token of this model spells it"
    return reason.removesuffix(".")


def _json_schema(text: str) -> dict[str, Any]:
    schema = parse_schema(text)
    if schema is False:
        raise ValueError("false allows nothing")
    return {"json_schema": read_strictly({} if schema is True else schema)}


def read_strictly(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the library's options for it; so it may also stand behind ``%json`` in a grammar.

    Raises:
        ValueError: an object has more optional properties than the library can look at, or a number is one that it
            would enforce as another.
    """
    check_numbers(schema)
    objects = [node for node in _nodes(schema) if node.keys() & {"properties", "patternProperties"}]
    for node in objects:
        _check_optional(node)
    # The last word on how strictly a schema is read is ours, not the schema's.
    options = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITESPACE}
    if all(node.get("additionalProperties") is False for node in objects):
        options["json_allow_general_unicode_escapes"] = True
    else:
        # An object that has named properties and takes others too would take "\u0061" for another name than "a".
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return {**schema, "x-guidance": options}


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object of the JSON text: all schemas in it, and a few that are none."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def _check_optional(node: dict[str, Any]) -> None:
    properties, required = node.get("properties"), node.get("required")
    if isinstance(properties, dict):
        count = len(properties) - (len(required) if isinstance(required, list) else 0)
        if count > _MAX_OPTIONAL:
            raise ValueError(
                f"an object has {count:,} properties that are not required, and at most {_MAX_OPTIONAL} may be"
            )


def _regex(text: str) -> dict[str, Any]:
    check_expression(text)
    return {"lark_grammar": f"start: /{import_library().regex_to_lark(text, 'dws')}/"}


def _choice(text: str) -> dict[str, Any]:
    # One terminal: alternatives of a rule are each followed by itself, which is dear and ends at `_MAX_ITEMS`.
    return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(item) for item in json.loads(text))}


def _grammar(text: str) -> dict[str, Any]:
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    check_numbers(list(inline_schemas(text)))
    try:
        return {"lark_grammar": any_to_lark(text)}
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from error


_SOURCES: dict[str, Callable[[str], dict[str, Any]]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_NAMES = {"json": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}


def _first_line(error: object) -> str:
    """What the library says, without the excerpt that it draws below."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    if "regex parse error" in lines[0]:  # the reason stands last
        lines = [line for line in lines if line.startswith("error:") or "error: " in line] or lines
    return lines[0].strip()[:300]


def _on_large_stack(run: Callable[[], LLMatcher], kind: str) -> LLMatcher:
    result: list[LLMatcher] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            result.append(run())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="modelbay-grammar", daemon=True)
    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(MAX_SECONDS)
    if errors:
        raise errors[0]
    if not result:
        raise UsageError(f"structured_outputs: compiling the {_NAMES[kind]} took over {MAX_SECONDS:g} seconds.")
    return result[0]
