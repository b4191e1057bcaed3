"""What cannot be used as a structured output is refused when the request arrives, by name, whatever it is."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import SamplingParams, StructuredOutputs, StructuredOutputsParams
from modelbay_runtime.structured import compiler
from modelbay_runtime.structured.grammars import Grammars
from modelbay_runtime.structured.spec import MAX_CHARS

BYTES = [bytes([byte]) for byte in range(256)]


def use(**spec: Any) -> None:
    Grammars(lambda: BYTES, len(BYTES)).constraint(StructuredOutputs(**spec), [])


# -- the specification itself


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, "exactly one of .*; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"json": {}, "json_object": True}, "got json and json_object"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[1]"}, "a JSON schema is an object"),
        ({"json": 3}, "json must be a schema"),
        ({"json": {"const": {1, 2}}}, "cannot be written as JSON"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"json": "[" * 100_000}, "nested too deeply|not JSON"),
        ({"json_object": "yes"}, "json_object must be true or false"),
        ({"regex": 3}, "regex must be text"),
        ({"regex": "\ud83d"}, "half of a character"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": ["yes", ""]}, "choice must not be empty"),
        ({"choice": [1]}, "choice must be text"),
        ({"grammar": ""}, "grammar must not be empty"),
        ({"regex": "a" * 10**6}, "1,000,000 characters, and at most"),
        ({"choice": ["a" * 10**6]}, "at most 131,072 are allowed"),
        ({"grammar": "start: " + "a" * 10**6}, "at most"),
        ({"json": {"enum": [str(number) for number in range(10**5)]}}, "at most"),
    ],
)
def test_a_specification_that_is_none(spec: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        StructuredOutputs(**spec)
    with pytest.raises(UsageError, match=reason):
        SamplingParams(structured_outputs=spec)


def test_a_schema_that_contains_itself() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    with pytest.raises(UsageError, match=r"cannot be written as JSON|nested too deeply"):
        StructuredOutputs(json=schema)


def test_forms_that_a_request_may_have() -> None:
    schema: Any = {"type": "integer"}
    regex: Any = {"regex": ""}
    unknown: Any = {"jsn": schema}
    mapping: Any = {"json": json.dumps(schema)}
    text: Any = "{}"
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)).structured_outputs
    assert asked == SamplingParams(structured_outputs=mapping).structured_outputs
    assert asked == StructuredOutputs(json=schema)
    assert SamplingParams(structured_outputs=None).structured_outputs is None
    assert SamplingParams(structured_outputs=regex).replace(n=2).structured_outputs == StructuredOutputs(regex="")
    assert asked is not None
    assert SamplingParams(structured_outputs=asked).with_defaults({"top_k": 3}).structured_outputs is asked
    with pytest.raises(UsageError, match="no field 'jsn'"):
        SamplingParams(structured_outputs=unknown)
    with pytest.raises(UsageError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs=text)


def test_a_field_that_does_not_exist_is_refused_alike_in_both_forms() -> None:
    unknown: Any = {"bogus": 1}
    for make in (lambda: StructuredOutputs(**unknown), lambda: SamplingParams(structured_outputs=unknown)):
        with pytest.raises(UsageError, match=r"structured_outputs has no field 'bogus'; known: json, json_object"):
            make()
    asked = StructuredOutputs(regex="a")
    assert copy.deepcopy(asked) == asked == pickle.loads(pickle.dumps(asked))


# -- what the library is asked to compile

#: Keywords of JSON Schema that limit what is valid and that are not enforced: ignoring one would be a wrong output.
NOT_ENFORCED: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 3}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {}}},
    {"type": "object", "propertyNames": {"pattern": "a"}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "array", "unevaluatedItems": False},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"$dynamicRef": "#a"},
    {"type": "string", "format": "no-such-format"},
    {"$ref": "http://localhost:1/schema"},
]


@pytest.mark.parametrize("schema", NOT_ENFORCED, ids=lambda schema: json.dumps(schema)[:30])
def test_a_keyword_that_is_not_enforced_is_refused_even_if_the_schema_asks_for_lenience(schema: dict[str, Any]) -> None:
    for given in (schema, {**schema, "x-guidance": {"lenient": True, "coerce_one_of": True}}):
        with pytest.raises(UsageError, match="the JSON schema cannot be used: "):
            use(json=given)
        with pytest.raises(UsageError, match="the JSON schema cannot be used: "):
            use(json={"type": "object", "properties": {"inner": given}})


@pytest.mark.parametrize(
    "spec",
    [
        {"json": {"type": "strng"}},
        {"json": "false"},
        {"json": {"enum": []}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json": {"$ref": "#"}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"type": "number", "multipleOf": 1e-300}},
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(491)}}},
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"regex": r"(a)\1"},
        {"regex": r"\bab"},
        {"regex": r"[^\s\S]"},
        {"regex": "a{99999999999}"},
        {"regex": "a\\"},
        {"regex": "\\"},
        {"regex": "a\\\\\\"},
        {"regex": "[a\\"},
        {"regex": "a*+a"},
        {"regex": "[ab]{1,2}+b"},
        {"regex": "[a-z&&[aeiou]]"},
        {"regex": "[a--b]"},
        {"regex": "[a~~b]"},
        {"regex": "(?x)a\nb"},
        {"regex": "(?x:a\t)b"},
        {"grammar": "start: start"},
        {"grammar": "start: nothing"},
        {"grammar": "root ::= ("},
        {"grammar": "no grammar at all"},
        {"grammar": "start: <|im_end|>"},
        {"grammar": 'start: A\nA: "a" A | "b"'},
    ],
    ids=lambda spec: str(spec)[:40],
)
def test_invalid_or_impossible(spec: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="structured_outputs: ") as raised:
        use(**spec)
    assert "\n" not in str(raised.value)


#: Every one is either refused or serves some steps, in bounded time; none may take the process down. The first ones
#: are as long as allowed and refer to each other as deeply as that permits.
HOSTILE = """
import json, time
from modelbay.errors import UsageError
from modelbay_runtime.structured.grammars import Grammars
from modelbay_runtime.structured.spec import MAX_CHARS, StructuredOutputs

def chain(link, last, kind):
    count = 10
    while len(json.dumps(link(count))) < 0.97 * MAX_CHARS[kind]:
        count = count * 9 // 8 + 1
    return link(count * 8 // 9)

def refs(n):
    named = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(n)}
    return {"$defs": {**named, f"a{n}": {"type": "null"}}, "$ref": "#/$defs/a0"}

def any_of(n):
    named = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"const": i}]} for i in range(n)}
    return {"$defs": {**named, f"a{n}": {"type": "null"}}, "$ref": "#/$defs/a0"}

def all_of(n):
    named = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "object"}]} for i in range(n)}
    return {"$defs": {**named, f"a{n}": {"type": "object"}}, "$ref": "#/$defs/a0"}

def nested(n):
    deep = {"$ref": "#/$defs/a%d"}
    for _ in range(100):
        deep = {"items": deep}
    text = json.dumps(deep)
    named = {f"a{i}": json.loads(text % (i + 1)) for i in range(n)}
    return {"$defs": {**named, f"a{n}": {"type": "null"}}, "$ref": "#/$defs/a0"}

rules = lambda n: "start: r0\\n" + "".join(f"r{i}: r{i + 1}\\n" for i in range(n)) + f'r{n}: "c"'
terminals = lambda n: "start: R0\\n" + "".join(f"R{i}: R{i + 1}\\n" for i in range(n)) + f'R{n}: "c"'
growing = lambda n: "start: r0\\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\\n' for i in range(n)) + f'r{n}: "c"'
optional = lambda n: {"type": "object", "properties": {f"p{i}": {} for i in range(n)}}
ebnf = lambda n: "root ::= " + "(" * n + '"a"' + ")" * n

cases = [
    *({"json": chain(link, None, "json")} for link in (refs, any_of, all_of, nested, optional)),
    *({"grammar": chain(link, None, "grammar")} for link in (rules, terminals, growing, ebnf)),
    {"json": {"enum": [f"value {i}" for i in range(8000)]}},
    {"grammar": "start: " + "|".join(['"a"'] * 8000)}, {"grammar": "start: " + '"a"?' * 8000},
    {"json": {"type": "string", "minLength": 10**9}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"json": {"type": "integer", "multipleOf": 982451653}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(6)]} for i in range(8)]}},
    {"regex": "(a{1000}){1000}"}, {"regex": "((a{1000}){1000}){1000}"}, {"regex": "(a+)+b"},
    {"regex": "(a|b)*a(a|b){60}"}, {"regex": "a?" * 4000}, {"regex": "(" * 4000 + ")" * 4000},
    {"regex": "(\\\\p{L}+\\\\d?){1,200}x"}, {"regex": "(.*)*" * 1000}, {"regex": "((a*)*)*" * 500},
    {"grammar": "start: " + "(" * 16000 + '"a"' + ")" * 16000},
    {"grammar": 'start: x\\nx: x x | ""'}, {"grammar": 'start: x\\nx: x x x | "a"'},
    {"grammar": "start: R0\\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\\n" for i in range(40)) + 'R40: "c"'},
    {"grammar": "start: a\\na: " + '"b"? ' * 5000},
]
tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"aa", b'{"']
for case in cases:
    [kind] = case
    begin, steps, output = time.monotonic(), 0, []
    try:
        constraint = Grammars(lambda: tokens, len(tokens)).constraint(StructuredOutputs(**case), output)
        while steps < 30 and constraint.error is None and not constraint.finished:
            bits = constraint.allowed()
            allowed = [i for i in range(len(tokens)) if bits[i // 8] >> i % 8 & 1]
            if not allowed:
                break
            output.append(allowed[-1])
            steps += 1
        found = f"{steps} steps"
    except UsageError as error:
        found = "refused"
        assert "\\n" not in str(error) and len(str(error)) < 600, str(error)
    print(f"{kind} {found} {time.monotonic() - begin:.2f} s", flush=True)
print("done", len(cases))
"""


def test_no_hostile_specification_hangs_or_takes_the_process_down() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("done")
    assert any("steps" in line for line in lines)
    assert any("refused" in line for line in lines)


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the setting of the process that the compiler's thread needs is what it was."""
    stop, size = threading.Event(), threading.stack_size()
    monkeypatch.setattr(compiler, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(compiler, "_compile", lambda kind, text, tokenizer: stop.wait(20))
    try:
        with pytest.raises(UsageError, match=r"compiling the grammar took over 0\.05 seconds"):
            use(grammar='start: "a"')
    finally:
        stop.set()
    assert threading.stack_size() == size


def test_without_the_library_the_error_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"pip install 'modelbay-runtime\[structured\]'"):
        use(regex="a")


def test_importing_the_parameters_imports_no_library() -> None:
    code = (
        "import sys; from modelbay_runtime.sampling_params import SamplingParams; "
        "SamplingParams(structured_outputs={'regex': 'a'}); assert not {'llguidance', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_limits_are_those_that_are_documented() -> None:
    assert MAX_CHARS == {"json": 131_072, "choice": 131_072, "grammar": 32_768, "regex": 8_192}
