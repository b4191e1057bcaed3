"""The page for everybody: names and roles, keyboard, contrast, themes, phones, less motion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

VIEWS = ("chat", "trace", "metrics", "plugins")
TAB, ENTER = "\ue004", "\ue007"
#: Roles that must have a name, in the words of the accessibility tree.
NAMED = {
    "button", "link", "textbox", "searchbox", "spinbutton", "combobox", "checkbox", "img", "image", "log", "table",
    "navigation", "region", "DisclosureTriangle", "heading", "columnheader", "figure", "Figure",
}  # fmt: skip


@pytest.fixture
def filled(browser: Any, page_server: Any) -> Callable[[str], None]:
    """``filled("trace")``: the page with something in every view, showing one."""
    browser.open_ready(page_server)
    browser.set("max-tokens", "6")
    browser.one("#prompt").send_keys("The quick", ENTER)
    browser.wait(lambda: browser.text(".message.assistant .ended"))

    def show(view: str) -> None:
        browser.go(view)
        inside = {"chat": "article", "metrics": "figure"}.get(view, "table tbody tr")
        browser.wait(lambda: browser.shown(f"#view-{view} {inside}"))

    return show


def accessible(browser: Any) -> list[dict[str, Any]]:
    """Role, name and id of the nodes that assistive technology sees, as the browser computes them."""
    browser.driver.execute_cdp_cmd("Accessibility.enable", {})
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [
        {"role": node["role"]["value"], "name": node.get("name", {}).get("value", ""), "node": node}
        for node in nodes
        if not node["ignored"]
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_whatever_can_be_used_has_a_role_and_a_name(browser: Any, filled: Callable[[str], None], view: str) -> None:
    filled(view)
    found = accessible(browser)
    roles = {node["role"] for node in found}
    assert {"banner", "main", "navigation", "heading"} <= roles
    assert {"chat": "log", "metrics": "image"}.get(view, "table") in roles | ({"image"} if "img" in roles else set())
    nameless = [node["role"] for node in found if node["role"] in NAMED and not node["name"].strip()]
    assert not nameless
    if view in ("trace", "plugins"):
        assert {"columnheader", "rowheader", "cell"} <= roles
    problems = browser.js("""
      const visible = (e) => e.checkVisibility();
      const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
      return {
        lang: document.documentElement.lang ? [] : ["no language"],
        ids: ids.filter((id, at) => ids.indexOf(id) !== at),
        tabindex: [...document.querySelectorAll("[tabindex]")].filter((e) => e.tabIndex > 0).map((e) => e.id),
        unlabelled: [...document.querySelectorAll("input, select, textarea")]
          .filter((e) => !e.labels.length).map((e) => e.id),
        images: [...document.querySelectorAll("img")].filter((e) => !e.hasAttribute("alt")).map((e) => e.src),
        references: [...document.querySelectorAll("[aria-describedby], [aria-labelledby]")]
          .flatMap((e) => [e.getAttribute("aria-describedby"), e.getAttribute("aria-labelledby")])
          .filter((id) => id && !document.getElementById(id)),
        headings: [...document.querySelectorAll("h1")].filter(visible).length === 1 ? [] : ["not one h1"],
        current: document.querySelectorAll("nav a[aria-current=page]").length === 1 ? [] : ["not one current"],
      };
    """)
    assert not any(problems.values()), problems


CONTRAST = """
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      const [r, g, b, alpha = 1] = channels(color);
      if (alpha === 1) return [r, g, b];
      if (alpha > 0) throw new Error(`a background that shines through: ${color}`);
    }
    return channels(getComputedStyle(document.documentElement).backgroundColor);
  };
  const ratio = (one, two) => {
    const [high, low] = [light(one), light(two)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const seen = [];
  const look = (element, pseudo, text) => {
    const style = getComputedStyle(element, pseudo);
    const color = channels(style.color);
    if (color.length > 3 && color[3] < 1) throw new Error(`text that shines through: ${style.color}`);
    seen.push([ratio(color, behind(element)), text.trim().slice(0, 40), style.color, String(behind(element))]);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode());) {
    const element = node.parentElement;
    const exempt = element.closest(":disabled, .visually-hidden, noscript, option");
    if (node.data.trim() && element.checkVisibility() && !exempt) {
      look(element, null, node.data);
    }
  }
  for (const field of document.querySelectorAll("[placeholder]")) {
    if (field.checkVisibility()) look(field, "::placeholder", field.placeholder);
  }
  return seen;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser: Any, filled: Callable[[str], None], theme: str) -> None:
    browser.prefers(color_scheme=theme)
    for view in VIEWS:
        filled(view)
        seen = browser.js(CONTRAST)
        assert len(seen) > 10
        assert [item for item in seen if item[0] < 4.5] == [], view
    backgrounds = browser.js("return getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in backgrounds[4:-1].split(", ")) > 3 * 128
    assert light == (theme == "light")


def test_the_theme_is_the_systems_until_one_is_chosen_which_is_kept(browser: Any, page_server: Any) -> None:
    def look() -> tuple[str, str]:
        found = browser.js(
            "return [getComputedStyle(document.body).backgroundColor,"
            " document.getElementById('theme').getAttribute('aria-pressed')]"
        )
        return found[0], found[1]

    browser.open_ready(page_server)
    light, pressed = look()
    assert pressed == "false"
    browser.prefers(color_scheme="dark")
    browser.wait(lambda: look()[1] == "true")
    dark, _ = look()
    assert dark != light
    browser.one("#theme").send_keys(ENTER)
    assert look() == (light, "false")
    browser.driver.refresh()
    browser.wait(lambda: look() == (light, "false"))
    browser.prefers(color_scheme="light")
    browser.one("#theme").send_keys(ENTER)
    assert look() == (dark, "true")


def test_everything_is_reached_by_tab_and_shows_that_it_has_the_focus(
    browser: Any, filled: Callable[[str], None]
) -> None:
    filled("chat")
    browser.js("document.activeElement.blur(); document.body.tabIndex = -1; document.body.focus();")
    reached = []
    for _ in range(30):
        browser.keys(TAB)
        name = browser.focused()
        if name.startswith("BODY") or (reached and name == reached[0]):
            break
        outline = browser.js(
            "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]"
        )
        assert outline[0] != "none", name
        assert outline[1] == "2px", name
        reached.append(name)
    order = ["A Skip to the content", "A Chat", "A Trace", "A Metrics", "A Plugins", "model", "theme", "log", "prompt",
             "new", "send", "SUMMARY Settings", "temperature", "max-tokens", "seed", "key"]  # fmt: skip
    assert reached == order
    wanted = browser.js("return [...document.querySelectorAll('a, button, input, select, textarea, summary')]"
                        ".filter((e) => e.checkVisibility()).map((e) => e.id || e.textContent)")  # fmt: skip
    assert {name.removeprefix("A ").removeprefix("SUMMARY ") for name in reached} >= set(wanted)


def test_views_are_changed_by_keyboard_and_the_focus_follows(browser: Any, page_server: Any) -> None:
    browser.open_ready(page_server)
    for view in ("trace", "metrics", "plugins", "chat"):
        browser.one(f"nav a[href='#{view}']").send_keys(ENTER)
        browser.wait(lambda view=view: browser.shown(f"#view-{view}"))
        assert browser.focused() == ("prompt" if view == "chat" else f"{view}-title")
        assert browser.js("return document.querySelector('nav [aria-current]').hash") == f"#{view}"
    browser.driver.back()
    browser.wait(lambda: browser.shown("#view-plugins"))
    browser.js("document.querySelector('.skip').focus()")
    assert browser.js("return document.querySelector('.skip').getBoundingClientRect().left") >= 0, "it shows itself"
    browser.keys(ENTER)
    assert browser.focused() == "main"
    assert browser.shown("#view-plugins"), "the skip link leaves the view"


@pytest.mark.parametrize(("width", "height"), [(360, 740), (320, 560), (768, 1024)])
def test_nothing_is_wider_than_a_phone(browser: Any, filled: Callable[[str], None], width: int, height: int) -> None:
    browser.size(width, height)
    browser.js("""
      const long = document.querySelector(".message.assistant .content");
      long.append(Object.assign(document.createElement("p"), { textContent: "wide".repeat(200) }));
    """)
    for view in VIEWS:
        filled(view)
        sizes = browser.js("""
          const root = document.documentElement;
          const wide = [root, ...document.querySelectorAll("main, .view, #log, .bar, table, .tools, .plots")]
            .filter((e) => e === root || e.checkVisibility())
            .filter((e) => e.scrollWidth > Math.max(e.clientWidth, e.offsetWidth))
            .map((e) => e.id || e.className || e.tagName);
          return { wide, page: [root.scrollWidth, root.scrollHeight, innerWidth, innerHeight] };
        """)
        assert sizes["wide"] == [], view
        assert sizes["page"][:2] == [width, height], f"{view}: the page itself does not scroll"
    filled("chat")
    for name in ("send", "prompt", "new", "model", "theme"):
        box = browser.js("return document.getElementById(arguments[0]).getBoundingClientRect().toJSON()", name)
        assert box["left"] >= 0, name
        assert box["right"] <= width, name
        assert box["bottom"] <= height, name
        assert min(box["width"], box["height"]) >= 24, name


def test_nothing_moves_for_those_who_want_less_motion(browser: Any, page_server: Any) -> None:
    browser.open_ready(page_server)
    moves = """
      const made = document.createElement("div");
      made.className = "waiting";
      made.append(Object.assign(document.createElement("div"), { className: "content" }));
      document.getElementById("log").append(made);
      return getComputedStyle(made.firstChild, "::after").animationName;
    """
    assert browser.js(moves) == "breathe"
    browser.prefers(color_scheme="light", reduced_motion="reduce")
    assert browser.js(moves) == "none"
