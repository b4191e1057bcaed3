"""``modelbay generate`` and ``modelbay chat``, as people and programs use them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay.cli.main import run
from modelbay_testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=20_000)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """What the commands must agree with."""
    with LLM(str(model), max_num_seqs=8) as llm:
        yield llm


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``stdout, stderr = cli("generate", …, stdin="text")`` of a command that succeeds, in this process."""
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    for variable in ("MODELBAY_PLUGINS", "MODELBAY_PREFER"):
        monkeypatch.delenv(variable, raising=False)

    def call(*argv: str | Path, stdin: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = run(list(map(str, argv)))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out, captured.err

    return call


def text_of(llm: LLM, prompt: str, **changes: Any) -> str:
    return llm.generate(prompt, PARAMS.replace(**changes))[0].outputs[0].text


# -- generate


def test_one_prompt_is_its_text_and_nothing_else(cli: Run, model: Path, llm: LLM) -> None:
    out, err = cli("generate", model, "--prompt", "The quick", *GREEDY)
    assert out == text_of(llm, "The quick") + "\n"
    assert re.fullmatch(r"KV cache: up to [\d,]+ MiB as it fills, [\d,]+ blocks, [\d,]+ tokens \(.*\)\n", err)


def test_several_prompts_stand_under_their_headings(cli: Run, model: Path, llm: LLM) -> None:
    out, _ = cli("generate", model, "--prompt", "The quick", "--prompt", "A model", *GREEDY)
    assert out == "".join(f"=== {prompt}\n{text_of(llm, prompt)}\n" for prompt in ("The quick", "A model"))


def test_a_dash_reads_standard_input(cli: Run, model: Path, llm: LLM) -> None:
    out, _ = cli("generate", model, "--prompt", "-", *GREEDY, stdin="The quick\nbrown")
    assert out == text_of(llm, "The quick\nbrown") + "\n"


def test_several_outputs_of_one_prompt(cli: Run, model: Path, llm: LLM) -> None:
    out, _ = cli(
        "generate", model, "--prompt", "The", "--n", "3", "--temperature", "1", "--max-tokens", "4", "--seed", "7"
    )
    with LLM(str(model), seed=7) as seeded:
        (expected,) = seeded.generate("The", SamplingParams(n=3, temperature=1, max_tokens=4))
    texts = [completion.text for completion in expected.outputs]
    assert len(set(texts)) == 3
    assert out == "".join(f"=== The [{index}]\n{text}\n" for index, text in enumerate(texts))


def test_stop_texts_end_the_output(cli: Run, model: Path, llm: LLM) -> None:
    whole = text_of(llm, "The quick")
    stop = whole[4:6]
    out, _ = cli("generate", model, "--prompt", "The quick", *GREEDY, "--stop", "never there", "--stop", stop)
    assert out == whole[: whole.index(stop)] + "\n"


def test_sampling_flags_reach_the_sampler(cli: Run, model: Path, llm: LLM) -> None:
    out, _ = cli(
        "generate", model, "--prompt", "The quick", "--max-tokens", "9", "--ignore-eos", "--temperature", "0.7",
        "--top-k", "1", "--repetition-penalty", "1.5", "--min-tokens", "2", "--frequency-penalty", "0.5",
    )  # fmt: skip
    expected = text_of(llm, "The quick", max_tokens=9, repetition_penalty=1.5, frequency_penalty=0.5)
    assert out == expected + "\n"


def test_json_is_everything_about_each_output(cli: Run, model: Path, llm: LLM) -> None:
    prompts = ("The quick", "A model")
    out, _ = cli(
        "generate", model, "--prompt", prompts[0], "--prompt", prompts[1], *GREEDY, "--json", "--logprobs", "2"
    )
    outputs = llm.generate(list(prompts), PARAMS.replace(logprobs=2))
    for found, expected in zip(json.loads(out), outputs, strict=True):
        assert found["prompt"] == expected.prompt
        assert found["prompt_token_ids"] == list(expected.prompt_token_ids)
        assert found["finished"] is True
        (completion,) = found["outputs"]
        wanted = json.loads(json.dumps(expected.outputs[0].to_dict()))
        assert completion["text"] == wanted["text"]
        assert completion["token_ids"] == wanted["token_ids"]
        assert completion["finish_reason"] == "length"
        assert len(completion["logprobs"]) == 12
        assert [list(position) for position in completion["logprobs"]] == [list(p) for p in wanted["logprobs"]]
        assert completion["cumulative_logprob"] == pytest.approx(wanted["cumulative_logprob"], abs=1e-3)


def test_chat_and_system_put_the_prompt_into_the_template(cli: Run, model: Path, llm: LLM) -> None:
    user = {"role": "user", "content": "The quick"}
    out, _ = cli("generate", model, "--prompt", "The quick", "--chat", *GREEDY)
    assert out == llm.chat([user], PARAMS)[0].outputs[0].text + "\n"
    out, _ = cli("generate", model, "--prompt", "The quick", "--chat", "--system", "Be brief.", *GREEDY)
    system = {"role": "system", "content": "Be brief."}
    assert out == llm.chat([system, user], PARAMS)[0].outputs[0].text + "\n"


def test_verbose_says_what_became_of_every_tensor(cli: Run, model: Path, llm: LLM) -> None:
    out, err = cli("generate", model, "--prompt", "The quick", *GREEDY, "--verbose")
    assert out == text_of(llm, "The quick") + "\n"
    for name in llm.load_report.tensors:
        assert any(f" {name} " in line and line.startswith("loaded") for line in err.splitlines()), name
    assert any(line.startswith("21 tensors") for line in err.splitlines())


def test_engine_flags_reach_the_engine(cli: Run, model: Path) -> None:
    _, err = cli(
        "generate",
        model,
        "--prompt",
        "The",
        *GREEDY,
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "2",
        "--block-size",
        "8",
    )
    assert "16 blocks, 128 tokens (all that max_num_seqs=2 sequences can use)" in err


def test_output_is_streamed(model: Path) -> None:
    """The first piece is there long before the last one is made."""
    argv = ["--prompt", "The", "--max-tokens", "3000", "--ignore-eos", "--temperature", "1"]
    with start("generate", model, *argv, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        assert first
        assert process.poll() is None
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert len(rest) > 100


# -- chat


def answers(llm: LLM, *questions: str, system: str | None = None) -> list[str]:
    """What each question gets when all before it, and their answers, are part of the conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        found.append(llm.chat(messages, PARAMS)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_chat_through_a_pipe_remembers(cli: Run, model: Path, llm: LLM) -> None:
    out, _ = cli("chat", model, *GREEDY, stdin="The quick\n\nA model\n")
    expected = answers(llm, "The quick", "A model")
    assert out == "".join(text + "\n" for text in expected)
    assert expected[1] != answers(llm, "A model")[0]


def test_clear_forgets_and_exit_leaves(cli: Run, model: Path, llm: LLM) -> None:
    out, _ = cli("chat", model, *GREEDY, "--system", "Be brief.", stdin="The quick\n/clear\nA model\n/exit\nThe\n")
    alone = [answers(llm, question, system="Be brief.")[0] for question in ("The quick", "A model")]
    assert out == "".join(text + "\n" for text in alone)


def test_help_is_no_question(cli: Run, model: Path, llm: LLM) -> None:
    out, _ = cli("chat", model, *GREEDY, stdin="/help\nThe quick\n")
    help_text, answer = out.split("\n", 1)
    assert "/clear" in help_text
    assert answer == answers(llm, "The quick")[0] + "\n"


def test_a_conversation_that_outgrew_the_model_goes_on_after_clear(cli: Run, model: Path, llm: LLM) -> None:
    argv = [*GREEDY, "--max-model-len", "64"]
    out, err = cli("chat", model, *argv, stdin=f"The quick\n{'long ' * 60}\nA model\n/clear\nThe quick\n")
    first, second = answers(llm, "The quick", "A model")
    assert "error: the prompt has" in err
    # The question that did not fit was taken back: the one after it does.
    assert out == f"{first}\n{second}\n{first}\n"


# -- as a process


def start(*argv: str | Path, **streams: Any) -> subprocess.Popen[str]:
    # A shell starts background jobs with the signal ignored, and children inherit that.
    code = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); import modelbay.cli.main as m; m.main()"
    environ = {**os.environ, "MODELBAY_CONFIG": "", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")} | streams
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.Popen(command, text=True, env=environ, **pipes)


class Terminal:
    """A program at a terminal of its own: `expect` a text, `send` another."""

    def __init__(self, process: subprocess.Popen[str], fd: int) -> None:
        self.process, self.fd, self.unread = process, fd, ""

    def expect(self, text: str, timeout: float = 120) -> str:
        """What was written up to and with ``text``."""
        until = time.monotonic() + timeout
        while text not in self.unread:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no {text!r} in {self.unread!r}"
            try:
                piece = os.read(self.fd, 65536)
            except OSError:  # the other end is closed
                piece = b""
            assert piece, f"the program ended without {text!r}: {self.unread!r}"
            self.unread += piece.decode("utf-8", "replace")
        end = self.unread.index(text) + len(text)
        found, self.unread = self.unread[:end], self.unread[end:]
        return found

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self, text: str) -> str:
        """Press Ctrl-C until ``text`` appears: one that comes just before the line editor listens is not seen by it."""
        for _ in range(20):
            self.send("\x03")
            with suppress(AssertionError):
                return self.expect(text, timeout=3)
        return self.expect(text, timeout=3)


@contextmanager
def terminal(*argv: str | Path) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = start(
        *argv, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lambda: os.login_tty(os.dup(theirs))
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX terminal")
def test_chat_at_a_terminal(model: Path, llm: LLM) -> None:
    """Greeted, prompted, answered; Ctrl-C stops an answer or a line, and the conversation goes on; Ctrl-D leaves."""
    with terminal("chat", model, "--temperature", "0", "--ignore-eos", "--max-tokens", "19000") as chat:
        assert "/clear forgets the conversation" in chat.expect("> ")
        chat.send("The quick\n")
        chat.expect("The quick\r\n")
        begun = answers(llm, "The quick")[0][:6].replace("\n", "\r\n")
        chat.expect(begun)  # an answer has begun, and would go on for long
        chat.send("\x03")
        assert chat.expect("> ").rstrip().endswith("(stopped)\r\n>")
        chat.send("half a line")
        chat.expect("half a line")
        chat.interrupt("(Ctrl-D leaves)")
        chat.expect("> ")
        chat.send("/help\n")
        chat.expect("Ctrl-C stops an answer.")
        chat.expect("> ")
        chat.send("\x04")
        assert chat.process.wait(timeout=60) == 0


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_in_a_piped_chat_stops_the_answer_alone(model: Path) -> None:
    with start("chat", model, "--temperature", "1", "--ignore-eos", "--max-tokens", "19000") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("The quick\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("/exit\n", timeout=120)
    assert process.returncode == 0
    assert out.endswith("\n")
    assert err.endswith(" (stopped)")
    assert "Traceback" not in err
