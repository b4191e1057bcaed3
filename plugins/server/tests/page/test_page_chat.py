"""The conversation of the page: sent by keyboard, streamed, stopped; and what a model says stays text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay_testing.tiny import tiny_checkpoint

ENTER, ESCAPE, SHIFT = "\ue007", "\ue00c", "\ue008"
NULL = "\ue000"  # lets modifiers go
ANSWER = ".message.assistant:last-child .content"


def idle(browser: Any) -> bool:
    return browser.js("return document.getElementById('log').getAttribute('aria-busy')") == "false"


def ask(browser: Any, text: str, **settings: str) -> None:
    """Type a message and press Enter; settings by the ids of their fields."""
    for name, value in settings.items():
        browser.set(name.replace("_", "-"), value)
    browser.one("#prompt").click()
    browser.keys(text, ENTER)


def offline_answer(server: Any, *messages: dict[str, str], **params: Any) -> str:
    body = {"messages": messages, **params}
    content: str = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    return content


def test_an_answer_streams_in_and_is_the_one_that_the_api_gives(
    browser: Any, page_server: Any, pace: Callable[[Any], Any]
) -> None:
    expected = offline_answer(page_server, {"role": "user", "content": "The quick"}, temperature=0, max_tokens=12)
    browser.open_ready(page_server)
    held = pace(page_server)
    ask(browser, "The quick", temperature="0", max_tokens="12")
    assert browser.focused() == "prompt"
    held.steps(4)
    first = browser.wait(lambda: browser.text(ANSWER), "the first text")
    assert browser.shown("#stop")
    assert not browser.shown("#send")
    assert len(first) < len(expected)
    assert expected.startswith(first)
    held.steps(3)
    browser.wait(lambda: len(browser.text(ANSWER)) > len(first), "more text")
    assert not idle(browser)
    held.free()
    browser.wait(lambda: idle(browser), "the end")
    assert browser.text(ANSWER) == expected
    assert browser.text(".message.user .content") == "The quick"
    note = browser.text(".message.assistant .ended")
    assert "most tokens" in note
    assert "12 tokens" in note
    assert browser.js("return document.getElementById('spoken').getAttribute('aria-live')") == "polite"
    spoken = browser.text("#spoken")
    assert "".join(expected.split()) in "".join(spoken.split()), "who listens hears all of it"


def test_a_conversation_goes_on_from_what_was_said_and_begins_anew(browser: Any, page_server: Any) -> None:
    browser.open_ready(page_server)
    said = []
    for count, text in enumerate(("one", "two"), 1):
        ask(browser, text, temperature="0", max_tokens="8")
        browser.wait(lambda count=count: len(browser.all(".message.assistant .ended")) == count)
        said += [{"role": "user", "content": text}]
        expected = offline_answer(page_server, *said, temperature=0, max_tokens=8)
        assert browser.text(ANSWER) == expected
        said += [{"role": "assistant", "content": expected}]
    browser.one("#new").send_keys(ENTER)
    assert not browser.all(".message")
    assert browser.focused() == "prompt"
    ask(browser, "two", temperature="0", max_tokens="8")
    browser.wait(lambda: idle(browser) and browser.text(ANSWER))
    expected = offline_answer(page_server, {"role": "user", "content": "two"}, temperature=0, max_tokens=8)
    assert browser.text(ANSWER) == expected


def test_shift_enter_starts_a_line_and_nothing_is_sent_without_text(browser: Any, page_server: Any) -> None:
    browser.open_ready(page_server)
    ask(browser, "   ")
    assert not browser.all(".message")
    browser.one("#prompt").clear()
    browser.one("#prompt").click()
    browser.keys("one", SHIFT, ENTER, NULL, "two")
    assert browser.js("return document.getElementById('prompt').value") == "one\ntwo"
    browser.set("max-tokens", "2")
    browser.one("#prompt").send_keys(ENTER)
    browser.wait(lambda: browser.all(".message.user"))
    assert browser.text(".message.user .content") == "one\ntwo"
    browser.wait(lambda: idle(browser))


def test_the_seed_decides_and_a_value_that_is_none_is_not_sent(browser: Any, page_server: Any) -> None:
    message = {"role": "user", "content": "The"}
    browser.open_ready(page_server)
    ask(browser, "The", temperature="1.5", max_tokens="10", seed="7")
    browser.wait(lambda: idle(browser) and browser.text(ANSWER))
    assert browser.text(ANSWER) == offline_answer(page_server, message, temperature=1.5, max_tokens=10, seed=7)
    browser.one("#new").click()
    ask(browser, "The", temperature="-1")
    assert not browser.all(".message"), "the browser says what is wrong with the field"


@pytest.mark.parametrize("how", ["escape", "button", "new conversation"])
def test_stop_ends_the_answer_and_the_server_forgets_the_request(
    browser: Any, page_server: Any, pace: Callable[[Any], Any], how: str
) -> None:
    page_server.wait_until_idle()
    free_before, _ = page_server.free_blocks()
    made_before = generated(page_server)
    browser.open_ready(page_server)
    held = pace(page_server)
    ask(browser, "The quick", temperature="0", max_tokens="1000")
    held.steps(6)
    browser.wait(lambda: browser.text(ANSWER), "text")
    if how == "escape":
        browser.keys(ESCAPE)
    else:
        browser.one("#stop" if how == "button" else "#new").click()
    browser.wait(lambda: idle(browser))
    page_server.wait_for(lambda: page_server.state.limiter.in_flight == 0)
    held.free()
    page_server.wait_until_idle()
    assert 6 <= generated(page_server) - made_before <= 8, "what was made is counted, and it was not made to its end"
    assert page_server.free_blocks()[0] == free_before
    page_server.wait_for(lambda: running(page_server) == 0)
    assert browser.focused() == "prompt"
    if how == "new conversation":
        assert not browser.all(".message")
        return
    assert "stopped" in browser.text(".message.assistant .ended")
    partial = browser.text(ANSWER)
    ask(browser, "on", max_tokens="4")  # from what was said until then
    browser.wait(lambda: idle(browser) and len(browser.all(".message.assistant")) == 2)
    said = [("user", "The quick"), ("assistant", partial), ("user", "on")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert browser.text(ANSWER) == offline_answer(page_server, *messages, temperature=0, max_tokens=4)


def metric(server: Any, name: str) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def running(server: Any) -> float:
    return metric(server, "modelbay_sequences_running")


def generated(server: Any) -> float:
    return metric(server, "modelbay_generation_tokens_total")


# ---- what a model says is text ---------------------------------------------------------------------------------------

HOSTILE = (
    '<img src=x onerror="window.broken=1">',
    "<script>window.broken=1</script>",
    '</p></div></article><iframe srcdoc="<script>parent.broken=1</script>">',
    "\n```html\n<svg onload=window.broken=1>\n```\n",
    '<a href="javascript:window.broken=1">x</a><style>*{display:none}</style>',
    "&lt;b&gt;<b>",
)
NAME = '<img src=y onerror="window.broken=1">'


@pytest.fixture(scope="module")
def hostile_server(tmp_path_factory: pytest.TempPathFactory, serving_in_module: Callable[..., Any]) -> Iterator[Any]:
    """A model of which three tokens in four are markup, under a name that is markup too."""
    from tokenizers import AddedToken, Tokenizer

    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("hostile"), vocab_size=1024, max_position_embeddings=2048)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [f"{text}{number}" for number in range(128) for text in HOSTILE]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    with serving_in_module((folder, NAME)) as server:
        yield server


def test_hostile_output_stays_text(browser: Any, hostile_server: Any) -> None:
    """No element, no script, no style and no request comes of what a model says, or of its name."""
    message = {"role": "user", "content": NAME}
    expected = offline_answer(hostile_server, message, temperature=1, seed=3, max_tokens=60)
    assert all(text.strip().split()[0] in expected for text in HOSTILE), "the model says all of it"
    browser.open_ready(hostile_server)
    tags = "return [...new Set([...document.querySelectorAll('*')].map((e) => e.tagName.toLowerCase()))].sort()"
    known = {*browser.js(tags), "article", "pre", "code", "h2", "p"}
    ask(browser, NAME, temperature="1", seed="3", max_tokens="60")
    browser.wait(lambda: idle(browser) and browser.text(".message.assistant .ended"))
    assert set(browser.js(tags)) <= known
    inside = browser.js("return [...document.querySelectorAll('#log *')].map((e) => e.tagName.toLowerCase())")
    assert set(inside) <= {"article", "div", "h2", "p", "pre", "code"}
    assert browser.text(".message.user .content") == NAME
    assert browser.text(".message.assistant .who") == NAME
    unfenced = "".join(line for line in expected.split("\n") if not line.lstrip().startswith("```"))
    assert "".join(browser.text(ANSWER).split()) == "".join(unfenced.split())
    for view in ("trace", "metrics", "plugins"):
        browser.go(view)
        browser.wait(lambda view=view: browser.all(f"#view-{view} {'figure' if view == 'metrics' else 'tr'}"))
    assert not browser.js("return window.broken ?? 0")
    assert browser.shown("#view-plugins")


def test_text_cannot_become_markup_even_by_a_mistake_of_ours(browser: Any, page_server: Any) -> None:
    """The policy: no script in the markup, no sink for markup, nothing from elsewhere."""
    headers = page_server.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert page_server.get("/app.js").headers["content-type"].startswith("text/javascript")
    browser.open_ready(page_server)
    browser.excused += ["TrustedHTML", "Trusted Type", "Content Security Policy", "evil.example"]
    refused = browser.module(
        "const made = document.createElement('div');"
        "try { made.innerHTML = '<b>x</b>'; return 'markup'; } catch (error) { return error.name; }"
    )
    assert refused == "TypeError"
    sent = "return fetch('https://evil.example/').then(() => 'sent', () => 'refused')"
    assert browser.module(sent) == "refused"
    added = (
        "const s = document.createElement('style'); s.textContent = 'body { opacity: 0.5 }'; document.head.append(s);"
    )
    assert browser.module(f"{added} return getComputedStyle(document.body).opacity") == "1"


# ---- how text grows --------------------------------------------------------------------------------------------------


def test_text_in_any_pieces_is_shown_as_the_whole(browser: Any, page_server: Any) -> None:
    """Code between fences becomes a block, whatever pieces the fences come in; everything else stays as it was."""
    browser.open_ready(page_server)
    code = """
      const { GrowingText } = await import("/text.js");
      const shown = (pieces) => {
        const target = document.createElement("div");
        const growing = new GrowingText(target);
        for (const piece of pieces) growing.append(piece);
        growing.end();
        return [...target.children].map((child) => [child.tagName, child.ariaLabel, child.textContent]);
      };
      let seed = 1;
      const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
      return args[0].map((text) => {
        const whole = shown([text]);
        for (let round = 0; round < 60; round += 1) {
          const pieces = [];
          for (let at = 0; at < text.length;) {
            const next = at + 1 + Math.floor(random() * 6);
            pieces.push(text.slice(at, next));
            at = next;
          }
          if (JSON.stringify(shown(pieces)) !== JSON.stringify(whole)) return { differs: pieces, whole };
        }
        return whole;
      });
    """
    texts = {
        "plain": [["P", None, "plain"]],
        "a\n```py\nx = '``'\n\n  y\n```\nb": [["P", None, "a\n"], ["PRE", "Code, py", "x = '``'\n\n  y\n"],
                                            ["P", None, "b"]],
        "```\nnever closed": [["PRE", "Code", "never closed"]],
        "``` not a fence, it has words": [["P", None, "``` not a fence, it has words"]],
        "a ```inline``` b\n``\n`": [["P", None, "a ```inline``` b\n``\n`"]],
        "```js\n1\n```": [["PRE", "Code, js", "1\n"]],
        "```a\n```b\n```": [["PRE", "Code, a", "```b\n"]],
        "\n\nafter empty lines\n\nmore": [["P", None, "after empty lines\n\nmore"]],
        "````\nx\n````\n": [["PRE", "Code", "x\n"]],
    }  # fmt: skip
    found = browser.module(code, list(texts))
    assert found == list(texts.values()), json.dumps(found, indent=1)


def test_events_may_end_in_the_middle_of_a_character(browser: Any, page_server: Any) -> None:
    browser.open_ready(page_server)
    code = """
      const { serverSentEvents } = await import("/api.js");
      const bytes = new TextEncoder().encode(args[0]);
      const found = new Set();
      for (let size = 1; size <= bytes.length; size += 1) {
        const body = new ReadableStream({ start(controller) {
          for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
          controller.close();
        } });
        const events = [];
        for await (const event of serverSentEvents(body)) events.push(event);
        found.add(JSON.stringify(events));
      }
      return [...found].map((text) => JSON.parse(text));
    """
    text = 'data: {"a":"é😀"}\n\n: a comment\n\ndata: b\r\n\r\ndata: c1\ndata: c2\n\n'
    assert browser.module(code, text) == [['{"a":"é😀"}', "b", "c1\nc2"]]


# ---- what goes wrong is said in words --------------------------------------------------------------------------------


def failure(browser: Any) -> str:
    return str(browser.wait(lambda: browser.shown("#failure") and browser.text("#failure"), "a failure"))


def test_what_the_server_refuses_is_said_and_the_message_kept(browser: Any, page_server: Any) -> None:
    browser.open_ready(page_server)
    browser.excused.append("400")
    browser.js("document.getElementById('prompt').value = 'The '.repeat(1200)")
    ask(browser, "and so on")
    assert "max_model_len=512" in failure(browser)
    assert not browser.all(".message"), "it was not sent"
    assert browser.js("return document.getElementById('prompt').value").startswith("The The"), "to be shortened"
    assert browser.js("return document.getElementById('failure').getAttribute('role')") == "alert"
    browser.one("#prompt").clear()
    ask(browser, "The", max_tokens="2")
    browser.wait(lambda: idle(browser) and browser.text(".message.assistant .ended"))
    assert not browser.shown("#failure")


def test_a_busy_server_says_when_to_come_back(
    browser: Any, serve: Callable[..., Any], tiny: Path, pace: Callable[[Any], Any]
) -> None:
    server = serve((tiny, "tiny"), max_concurrent_requests=1)
    held = pace(server)
    browser.open_ready(server)
    browser.excused.append("429")
    ask(browser, "first", max_tokens="5")
    server.wait_for(lambda: server.state.limiter.in_flight == 1)
    other = server.url  # a second page of the same server
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    browser.driver.get(other)
    browser.wait(lambda: browser.js("return document.getElementById('model').options.length"))
    ask(browser, "second")
    assert failure(browser) == "The server is busy. Try again in 1 s."
    browser.driver.close()
    browser.driver.switch_to.window(first)
    held.free()
    browser.wait(lambda: idle(browser) and browser.text(".message.assistant .ended"))


def test_a_server_that_is_gone_is_said_to_be(
    browser: Any, serving: Callable[..., Any], tiny: Path, pace: Callable[[Any], Any]
) -> None:
    browser.excused.append("net::")
    with serving((tiny, "tiny")) as server:
        browser.open_ready(server)
    ask(browser, "anyone?")
    assert failure(browser) == "The server cannot be reached. Is it still running?"
    browser.go("metrics")
    browser.wait(lambda: "cannot be reached" in browser.text("#metrics-state"))


def test_a_model_that_does_not_chat_says_what_it_is_for(browser: Any, serve: Callable[..., Any], tiny: Path) -> None:
    server = serve((tiny, "vectors"), engine={"runner": "pooling"})
    browser.open_ready(server)
    browser.wait(lambda: "served for embed" in browser.text("#empty"))
    ask(browser, "hello")
    assert not browser.all(".message")
    assert not browser.one("#send").is_enabled()


def test_the_key_is_asked_for_and_kept_for_this_tab_only(browser: Any, serve: Callable[..., Any], tiny: Path) -> None:
    server = serve((tiny, "tiny"), api_key="sk-secret-4711")
    browser.excused.append("401")
    browser.open(server)
    browser.wait(lambda: "asks for an API key" in browser.text("#notice") and browser.shown("#notice"))
    browser.one("#key").send_keys("wrong", ENTER)
    browser.wait(lambda: "does not accept" in browser.text("#notice"))
    browser.one("#key").clear()
    browser.one("#key").send_keys("ké", ENTER)
    browser.wait(lambda: "no key can have" in browser.text("#notice"))
    browser.one("#key").clear()
    browser.one("#key").send_keys("sk-secret-4711", ENTER)
    browser.wait(lambda: browser.js("return document.getElementById('model').value") == "tiny")
    assert not browser.shown("#notice")
    ask(browser, "The", max_tokens="2")
    browser.wait(lambda: idle(browser) and browser.text(".message.assistant .ended"))
    kept = "return [JSON.stringify(localStorage), document.cookie, location.href, document.documentElement.outerHTML]"
    assert not [text for text in browser.js(kept) if "4711" in text]
    browser.driver.refresh()
    browser.wait(lambda: browser.js("return document.getElementById('model').value") == "tiny")
