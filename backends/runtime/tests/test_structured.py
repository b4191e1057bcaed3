"""Structured outputs on random logits: whatever the model would say, the output is what was asked for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from modelbay.errors import EngineError, UsageError
from modelbay.tokenizer.fastokens import switch
from modelbay_runtime.engine.bad_words import BadWords, BadWordWatch
from modelbay_runtime.engine.detokenizer import Detokenizer
from modelbay_runtime.engine.sampler import Sampler, SamplerOutput
from modelbay_runtime.engine.sampling_state import SamplingState
from modelbay_runtime.sampling_params import SamplingParams, StructuredOutputs
from modelbay_runtime.structured import compiler
from modelbay_runtime.structured import grammars as grammars_module
from modelbay_runtime.structured.grammars import Grammars
from modelbay_runtime.structured.mask import constrain
from modelbay_testing.assets import deepseek_v3_tokenizer_dir, or_skip, qwen3_tokenizer_dir, smollm2_dir
from modelbay_testing.tiny import tiny_tokenizer


class Run:
    """One sequence, driven as the engine drives it."""

    def __init__(self, tokenizer: Any, spec: Any, *, vocab_size: int | None = None, **params: Any):
        self.vocab_size = vocab_size or len(tokenizer)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        detokenizer, grammars = shared(tokenizer, self.vocab_size)
        self.params = SamplingParams(structured_outputs=spec, **{"max_tokens": 400, **params})
        self.sampler, self.output = Sampler(self.vocab_size), list[int]()
        constraint = grammars.constraint(self.params.structured_outputs, self.output)
        self.state: SamplingState = self.sampler.state(
            self.params, [], self.output, request_id="r", eos_token_ids=eos, constraint=constraint
        )
        self.stream = detokenizer.stream(self.params, [tokenizer.convert_tokens_to_ids("a")])  # after some text
        self.reason: str | None = None
        self.stop_reason: int | str | None = None

    def take(self, drawn: SamplerOutput, row: int = 0) -> None:
        if row in drawn.endings:
            self.stream.finish()
            self.reason, self.stop_reason = drawn.endings[row]
            return
        self.output.append(drawn.token_ids[row])
        update = self.stream.append(self.output[-1])
        self.reason, self.stop_reason = update.finish_reason, update.stop_reason
        if self.reason is None and self.state.finished:
            self.stream.finish()
            self.reason = "stop"
        elif self.reason is None and len(self.output) == self.params.max_tokens:
            self.stream.finish()
            self.reason = "length"

    def finish(self, seed: int = 0) -> Run:
        generator = torch.Generator().manual_seed(seed)
        while self.reason is None:
            logits = torch.randn(1, self.vocab_size, generator=generator) * 3
            self.take(self.sampler.sample(logits, [self.state]))
        return self

    def favour(self, text: Sequence[int]) -> Run:
        """The model would say exactly this."""
        for token_id in text:
            if self.reason is not None:
                break
            logits = torch.zeros(1, self.vocab_size)
            logits[0, token_id] = 50.0
            self.take(self.sampler.sample(logits, [self.state]))
        return self

    @property
    def text(self) -> str:
        return self.stream.text

    def next_tokens(self) -> set[int]:
        """What may come next, the tokens that end the output among it."""
        scores = torch.zeros(1, -(-self.vocab_size // 256) * 256)
        constrain(scores, [self.state])
        return set(np.flatnonzero(scores[0].isfinite().numpy()).tolist())


_SHARED: dict[tuple[int, int], tuple[Any, Detokenizer, Grammars]] = {}


def shared(tokenizer: Any, vocab_size: int) -> tuple[Detokenizer, Grammars]:
    """As an engine has them: one of each for a tokenizer."""
    key = (id(tokenizer), vocab_size)
    if key not in _SHARED:
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        detokenizer = Detokenizer(tokenizer, eos)
        _SHARED[key] = (tokenizer, detokenizer, Grammars(lambda: detokenizer.token_bytes(vocab_size), vocab_size))
    return _SHARED[key][1:]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All bytes, some merges, and three special tokens."""
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tiny"), vocab_size=400))


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral."""
    words = ["▁", "▁yes", "yes", "no", "{", '"', "}", ":", "▁▁", "ö", "\n", "a", "b", "1", '{"']
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


# -- what comes out


SCHEMAS: list[Any] = [
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "string", "maxLength": 8},
    {"enum": ["red", "green", 7, None, True, {"a": [1]}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^[a-f0-9]{2,6}$"},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 10},
            "born": {"type": "integer", "minimum": 1900, "maximum": 2030},
            "mood": {"enum": ["good", "bad"]},
            "inner": {"$ref": "#/$defs/point"},
        },
        "required": ["name", "inner"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {axis: {"type": "number", "minimum": 0, "maximum": 1} for axis in "xy"},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {"anyOf": [{"type": "null"}, {"const": "é😀\n"}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_valid_json_of_the_schema(tiny: Any, schema: Any, temperature: float) -> None:
    for seed in range(4):
        run = Run(tiny, {"json": schema}, temperature=temperature, seed=seed).finish(seed)
        assert (run.reason, run.stop_reason) == ("stop", None)
        jsonschema.validate(json.loads(run.text), schema)


def leaves() -> st.SearchStrategy[Any]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 90))
    scalars = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3))
    return st.one_of(
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        bounds.map(lambda b: {"type": "number", "minimum": b[0], "maximum": b[0] + b[1]}),
        st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
            lambda b: {"type": "string", "minLength": b[0], "maxLength": b[0] + b[1]}
        ),
        st.lists(scalars, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        scalars.map(lambda value: {"const": value}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}]),
    )


def composites(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    objects = st.dictionaries(keys, st.tuples(inner, st.booleans()), max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": {key: schema for key, (schema, _) in properties.items()},
            "required": [key for key, (_, needed) in properties.items() if needed],
            "additionalProperties": False,
        }
    )
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[1] + a[2]}
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda s: {"anyOf": s}))


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(leaves(), composites, max_leaves=5), seed=st.integers(0, 2**32 - 1))
def test_any_small_schema_is_kept(tiny: Any, schema: Any, seed: int) -> None:
    run = Run(tiny, {"json": schema}, seed=seed, max_tokens=1000).finish(seed)
    assert run.reason == "stop", (run.reason, run.stop_reason)
    jsonschema.validate(json.loads(run.text), schema)


REGEXES = [
    r"\d{4}-\d{2}-\d{2}", r"(yes|no)", r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)", r"^abc$", r"\w{3,5}\s\S{2}", r"[^a-z]{2}",
    r"a/b\\c\n", r"", r"[äöü]{1,3}\D", r"(?i:yes)", "日本[語人]", r".{0,5}", r"(a|b)*c{2}", r"\$\{x\}|#+",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_the_whole_output_matches_the_regular_expression(tiny: Any, regex: str) -> None:
    for seed in range(5):
        run = Run(tiny, {"regex": regex}, seed=seed, ignore_eos=bool(seed % 2)).finish(seed)
        assert run.reason == "stop"
        # Case is Unicode's, classes are ASCII's.
        assert re.fullmatch(regex, run.text, 0 if "(?i" in regex else re.ASCII), run.text


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_the_output_is_one_of_the_choices(tiny: Any, choices: list[str], seed: int) -> None:
    run = Run(tiny, {"choice": choices}, seed=seed).finish(seed)
    assert run.reason == "stop"
    assert run.text in choices


@pytest.mark.parametrize("grammar", ['start: "x" start "y" | "z"', 'root ::= "x" root "y" | "z"'])
def test_grammars_in_lark_and_ebnf(tiny: Any, grammar: str) -> None:
    for seed in range(5):
        text = Run(tiny, {"grammar": grammar}, seed=seed).finish(seed).text
        depth = text.index("z")
        assert text == "x" * depth + "z" + "y" * depth


def test_any_json_object(tiny: Any) -> None:
    """Long ones do not end within the limit: then there is no valid JSON, and the reason says so."""
    ended = 0
    for seed in range(8):
        run = Run(tiny, {"json_object": True}, seed=seed).finish(seed)
        if run.reason == "stop":
            ended += 1
            assert isinstance(json.loads(run.text), dict)
        else:
            assert run.reason == "length"
            assert run.text.startswith("{")
    assert ended


def test_it_ends_only_where_the_output_is_complete_however_much_the_model_would_end_it(tiny: Any) -> None:
    eos = tiny.eos_token_id
    run = Run(tiny, {"regex": "ab+c?"}, temperature=0, logit_bias={eos: 100})
    run.favour([eos] * 20)
    assert re.fullmatch("ab+c?", run.text)
    assert run.reason == "stop"
    # And a complete output that could go on does go on, if the model says so.
    spelled = tiny("abbbb", add_special_tokens=False)["input_ids"]
    run = Run(tiny, {"regex": "ab+c?"}, temperature=0).favour(spelled)
    assert (run.text, run.reason) == ("abbbb", None)
    assert eos in run.next_tokens()


def test_stop_tokens_are_no_text(tiny: Any) -> None:
    """A stop token's text is not part of the output, so it may only come where the output is complete without it."""
    [stop] = tiny("b", add_special_tokens=False)["input_ids"]
    run = Run(tiny, {"regex": "a(b|c)"}, stop_token_ids=[stop], temperature=0)
    run.favour(tiny("ab", add_special_tokens=False)["input_ids"])
    assert (run.text, run.reason, run.stop_reason) == ("ac", "stop", None)
    run = Run(tiny, {"regex": "ac+"}, stop_token_ids=[stop], temperature=0)
    run.favour(tiny("acb", add_special_tokens=False)["input_ids"])
    assert (run.text, run.reason, run.stop_reason) == ("ac", "stop", stop)


MANY = {"properties": {f"p{i}": {} for i in range(480)}, "type": "object"}


def test_an_escaped_name_does_not_escape_its_schema(tiny: Any) -> None:
    """``"\\u0061"`` is "a": where it would be taken for another property, nothing is written with such escapes."""
    text = '{"\\u0061":"x"}'
    for schema, ends in (
        ({"type": "object"}, True),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, False),
        ({"properties": {"b": {"type": "object"}}, "type": "object", "additionalProperties": False}, False),
    ):
        run = Run(tiny, {"json": schema}, temperature=0).favour(tiny(text, add_special_tokens=False)["input_ids"])
        assert (run.text == text and run.reason == "stop") is ends, schema


# -- with the other parameters


def test_the_order_mask_after_penalties_before_temperature_and_top_k(tiny: Any) -> None:
    """top_k takes the likeliest of what is allowed, and a penalty applies to what is allowed too."""
    allowed = {tiny(text, add_special_tokens=False)["input_ids"][0] for text in "abc"}
    favourite = tiny("z", add_special_tokens=False)["input_ids"][0]
    for extra in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}):
        run = Run(tiny, {"regex": "[abc]{9}"}, **extra)
        logits = torch.zeros(1, run.vocab_size)
        logits[0, favourite] = 50.0
        logits[0, min(allowed)] = 1.0
        drawn = run.sampler.sample(logits, [run.state])
        assert drawn.token_ids == [min(allowed)], extra
    run = Run(tiny, {"regex": "[abc]{9}"}, temperature=0, presence_penalty=2.0)
    for _ in range(3):
        logits = torch.full((1, run.vocab_size), -1.0)
        logits[0, sorted(allowed)] = torch.tensor([1.0, 0.5, 0.0])
        run.take(run.sampler.sample(logits, [run.state]))
    assert sorted(run.text) == ["a", "b", "c"]


def test_logprobs_stay_those_of_the_raw_logits(tiny: Any) -> None:
    run = Run(tiny, {"choice": ["a"]}, temperature=0, logprobs=3)
    logits = torch.randn(1, run.vocab_size, generator=torch.Generator().manual_seed(1))
    drawn = run.sampler.sample(logits, [run.state])
    raw = logits.log_softmax(-1)[0]
    entry = drawn.logprobs[0]
    assert entry is not None
    assert math.isclose(entry.logprob, float(raw[drawn.token_ids[0]]), rel_tol=1e-5)
    assert list(entry.top_ids) == raw.topk(3).indices.tolist()


def test_free_rows_are_bit_identical_whatever_shares_their_batch(tiny: Any) -> None:
    free_params: list[dict[str, Any]] = [
        {"temperature": 0}, {"seed": 3}, {"seed": 4, "top_p": 0.8}, {"seed": 5, "repetition_penalty": 1.3, "top_k": 9},
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(8, len(tiny), generator=generator) for _ in range(12)]

    def outputs(specs: list[dict[str, Any]]) -> list[list[int]]:
        free = [Run(tiny, None, ignore_eos=True, **params) for params in free_params]
        bound = [Run(tiny, spec, seed=9) for spec in specs]
        sampler = free[0].sampler
        for logits in steps:
            alive = [*free, *(run for run in bound if run.reason is None)]
            drawn = sampler.sample(logits[: len(alive)], [run.state for run in alive])
            for row, run in enumerate(alive):
                run.take(drawn, row)
        return [run.output for run in free]

    alone = outputs([])
    mixed = outputs([{"json": SCHEMAS[6]}, {"regex": "[ab]*"}, {"choice": ["x"]}, {"regex": "é"}])
    assert mixed == alone


def test_min_tokens_holds_the_end_off_where_the_grammar_can_go_on(tiny: Any) -> None:
    eos = tiny.eos_token_id
    run = Run(tiny, {"regex": "a+"}, min_tokens=6, temperature=0, logit_bias={eos: 100}).favour([eos] * 20)
    assert len(run.output) == 7  # the last one is the end
    assert run.reason == "stop"


@pytest.mark.parametrize(
    ("spec", "params", "reason"),
    [
        ({"choice": ["a"]}, {"min_tokens": 5}, "min_tokens asks for more"),
        ({"regex": "[ab]x"}, {"logit_bias": {}, "stop_token_ids": ["a", "b"]}, "no token is left"),
        # More ways to go on than the library looks at: it says so where it gets there, not before.
        ({"json": {"anyOf": [MANY, {**MANY, "required": ["z"]}], "type": "object"}}, {}, "cannot go on"),
    ],
)
def test_a_conflict_ends_that_request_alone(
    tiny: Any, spec: dict[str, Any], params: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MAX_ITEMS", 2000)
    ids = {text: tiny(text, add_special_tokens=False)["input_ids"][0] for text in "ab"}
    params = {
        name: [ids[text] for text in value] if name == "stop_token_ids" else value for name, value in params.items()
    }
    run, free = Run(tiny, spec, seed=1, **params), Run(tiny, None, seed=2, ignore_eos=True)
    alone = Run(tiny, None, seed=2, ignore_eos=True)
    generator = torch.Generator().manual_seed(5)
    for _ in range(100):
        logits = torch.randn(2, len(tiny), generator=generator)
        drawn = run.sampler.sample(logits, [run.state, free.state])
        run.take(drawn, 0)
        free.take(drawn, 1)
        alone.take(alone.sampler.sample(logits[1:], [alone.state]))
        if run.reason is not None:
            break
    assert run.reason == "error"
    assert reason in str(run.stop_reason)
    assert free.output == alone.output


def test_bad_words_conflict_is_told_and_logits_that_are_no_numbers_are_still_an_error(tiny: Any) -> None:
    run = Run(tiny, {"choice": ["a"]}, seed=1)
    [only] = run.next_tokens()
    run.state.bad_words = BadWordWatch(BadWords([[only]]), run.output)
    run.take(run.sampler.sample(torch.zeros(1, run.vocab_size), [run.state]))
    assert run.reason == "error"
    assert "bad_words" in str(run.stop_reason)
    run = Run(tiny, {"choice": ["a"]}, seed=1)
    with pytest.raises(EngineError, match="nan"):
        run.sampler.sample(torch.full((1, run.vocab_size), math.nan), [run.state])


# -- vocabularies


def real(name: str) -> Any:
    folder = {
        "smollm2": lambda: smollm2_dir("bfloat16"), "qwen3": qwen3_tokenizer_dir, "deepseek": deepseek_v3_tokenizer_dir
    }[name]  # fmt: skip
    return AutoTokenizer.from_pretrained(or_skip(folder))


DOCUMENT = {"name": 'Zoë 😀\t"x"', "n": [1, -2.5, 1e20], "deep": {"": None, "ok": True}}


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("smollm2", "tokenizers"),
        ("qwen3", "fastokens"),
        pytest.param("qwen3", "tokenizers", marks=pytest.mark.deep),
        ("deepseek", "tokenizers"),
        pytest.param("deepseek", "fastokens", marks=pytest.mark.deep),
        pytest.param("smollm2", "fastokens", marks=pytest.mark.deep),
    ],
)
def test_real_tokenizers_spell_json_as_they_like_and_nothing_else(name: str, engine: str) -> None:
    """Every token of a document as the tokenizer itself writes it is allowed; random ones still give valid JSON; ids
    that the tokenizer does not know, and special tokens, never are (CASES 24)."""
    tokenizer = real(name)
    if engine == "fastokens":
        assert switch(tokenizer) is None
    vocab_size = len(tokenizer) + 267
    for text in (json.dumps(DOCUMENT), json.dumps(DOCUMENT, ensure_ascii=False, indent=1)):
        run = Run(tokenizer, {"json_object": True}, vocab_size=vocab_size, temperature=0)
        run.favour(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert (run.text, run.reason) == (text, "stop")
    schema = SCHEMAS[6]
    run = Run(tokenizer, {"json": schema}, vocab_size=vocab_size, seed=1).finish(1)
    jsonschema.validate(json.loads(run.text), schema)
    wide = Run(tokenizer, {"regex": r"(.|\n)*"}, vocab_size=vocab_size)
    allowed = wide.next_tokens()
    known = len(tokenizer)
    assert not [token_id for token_id in allowed if token_id >= known]
    assert not allowed & (set(tokenizer.all_special_ids) - {tokenizer.eos_token_id})
    assert len(allowed) > 0.9 * known - 3000  # all but special tokens and those that begin inside a character


def test_a_byte_fallback_vocabulary_spells_through_its_bytes() -> None:
    tokenizer = byte_fallback()
    for choice in (["😀 yes"], [" yes"], ['{"a": "ö"}'], ["naïve\n"]):
        for seed in range(4):
            run = Run(tokenizer, {"choice": choice}, seed=seed).finish(seed)
            assert run.text == choice[0]
    space = tokenizer.convert_tokens_to_ids("▁yes")
    assert space in Run(tokenizer, {"choice": [" yes"]}).next_tokens()
    assert space not in Run(tokenizer, {"choice": ["yes"]}).next_tokens()
    spaces = {tokenizer.convert_tokens_to_ids(token) for token in ("▁", "<0x20>", "▁yes")}
    assert Run(tokenizer, {"choice": [" yes"]}).next_tokens() == spaces


def test_what_the_tokenizer_cannot_spell_is_told(tmp_path: Any) -> None:
    """Printable ASCII alone: a text with another character is refused where it can be seen, or ends with an error."""
    narrow = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, vocab_size=256))
    run = Run(narrow, {"choice": ["aé"]}, seed=1).finish()
    assert run.reason == "error"
    assert "no token of this model spells it" in str(run.stop_reason)
    with pytest.raises(UsageError, match="no token of this model spells it"):
        Run(narrow, {"choice": ["é"]})
    assert Run(narrow, {"choice": ["é", "ab"]}).finish().text == "ab"


# -- one engine's grammars


def test_a_grammar_is_compiled_once_and_few_are_kept(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = grammars_module.compile_grammar

    def counting(kind: str, text: str, tokenizer: Any) -> Any:
        compiled.append(text)
        return original(kind, text, tokenizer)

    monkeypatch.setattr(grammars_module, "compile_grammar", counting)
    monkeypatch.setattr(grammars_module, "CAPACITY", 2)
    asked: list[int] = []
    detokenizer = Detokenizer(tiny, ())

    def token_bytes() -> list[bytes]:
        asked.append(1)
        return detokenizer.token_bytes(len(tiny))

    grammars = Grammars(token_bytes, len(tiny))
    assert grammars.constraint(None, []) is None
    assert not asked
    for letter in "aababcba":
        constraint = grammars.constraint(StructuredOutputs(regex=letter), [])
        assert constraint is not None
    assert compiled == ["a", "b", "c", "a"]
    assert len(asked) == 1


def test_two_sequences_of_one_grammar_do_not_share_their_place(tiny: Any) -> None:
    first = Run(tiny, {"choice": ["abc", "xyz"]}, seed=1).finish(1)
    second = Run(tiny, {"choice": ["abc", "xyz"]}, seed=2)
    assert second.next_tokens() >= {tiny(t, add_special_tokens=False)["input_ids"][0] for t in "ax"}
    assert first.text in ("abc", "xyz")
