"""The chat page in a real browser, over a real stack; and with canned answers that no model would give."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from router.auth import digest, new_key
from tests.e2e.browser import chromium, complaints
from tests.e2e.stack import Stack, launched, until

pytestmark = pytest.mark.e2e

LONG = "Write a long story about a lighthouse."
HOSTILE = "<img src=x onerror=document.title='owned'> <script>document.title='owned'</script>"
MARKDOWN = f"""# Heading
A **bold** word, an *emphasis* and `code <b>`.
{HOSTILE}

- first
- **second**

3. third
4. fourth

```html
{HOSTILE}
```
[good](https://example.com/a?b=c) [bad](javascript:alert(1)) [worse](data:text/html,x) [odd](//example.com)
"""
# Answers every question with `chunks`, each a piece of the body.
CANNED = """
  const [status, type, chunks] = arguments;
  const fetched = window.fetch;
  window.fetch = (path, options) => {
    if (path !== "v1/chat/completions") return fetched(path, options);
    window.asked = JSON.parse(options.body);
    const encoder = new TextEncoder();
    const body = new ReadableStream({
      start(controller) {
        for (const chunk of chunks) controller.enqueue(encoder.encode(chunk));
        controller.close();
      },
    });
    return Promise.resolve(new Response(body, { status, headers: { "Content-Type": type } }));
  };
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


class Page:
    """The chat page, as a reader finds it."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        complaints(browser)
        browser.get(url.removesuffix("v1"))

    def find(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def wait_status(self, text: str) -> "Page":
        until(lambda: text in self.one("#status").text)
        return self

    def ask(self, question: str) -> None:
        self.one("#question").send_keys(question, Keys.ENTER)

    def answer(self) -> str:
        """The text of the last answer."""
        answers = self.find(".turn.assistant .text")
        return answers[-1].text if answers else ""

    def set(self, selector: str, value: str) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(value)

    def can(self, *pieces: str, status: int = 200, content_type: str = "text/event-stream") -> None:
        """From now on questions are answered so."""
        self.browser.execute_script(CANNED, status, content_type, list(pieces))


def event(content: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}, 'finish_reason': None}]})}\n\n"


@pytest.fixture
def page(stack: Stack, browser: webdriver.Chrome) -> Iterator[Page]:
    yield Page(browser, stack.url).wait_status("Ready")
    assert complaints(browser) == []


def test_a_question_is_answered_and_counted(page: Page, model: str) -> None:
    assert page.one("#model").text == f"{model}, 8,192 tokens of context"
    page.set("#temperature", "0")
    page.set("#max-tokens", "24")

    page.ask("What is the capital of France?")
    page.wait_status("Ready")

    assert page.one(".turn.user .text").text == "What is the capital of France?"
    assert "Paris" in page.answer()
    figures = page.one(".turn.assistant .figures").text
    for text in ("prompt tokens", "output tokens", "first token after", "tokens/s"):
        assert text in figures
    assert not page.one("#context").text.startswith("0 of")


def test_what_was_said_before_goes_along_until_a_new_conversation(page: Page) -> None:
    page.can(event("Blue."), "data: [DONE]\n\n")
    page.set("#system", "Be brief.")
    for question in ("Which colour?", "Sure?"):
        page.ask(question)
        page.wait_status("Ready")
    assert page.browser.execute_script("return window.asked.messages") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which colour?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Sure?"},
    ]

    page.one("#new").click()
    assert page.find(".turn") == []
    page.ask("Again?")
    page.wait_status("Ready")

    assert len(page.browser.execute_script("return window.asked.messages")) == 2


@pytest.mark.parametrize("way", ["button", "key", "new conversation", "leaving"])
def test_an_answer_that_is_stopped_frees_its_blocks(page: Page, stack: Stack, way: str) -> None:
    before = cancelled(stack)
    page.ask(LONG)
    until(lambda: len(page.answer()) > 20)
    assert stack.used_blocks() > 0

    match way:
        case "button":
            page.one("#stop").click()
        case "key":
            page.one("#question").send_keys(Keys.ESCAPE)
        case "new conversation":
            page.one("#new").click()
        case "leaving":
            page.browser.get("about:blank")

    until(lambda: stack.used_blocks() == 0)
    until(lambda: cancelled(stack) == before + 1)
    if way in ("button", "key"):
        page.wait_status("Ready")
        assert page.one(".turn.assistant .figures").text.endswith("stopped")
        assert page.answer()


def cancelled(stack: Stack) -> float:
    """Chats whose client went away before their end."""
    sample = r'^pagoda_router_requests_total\{code="CANCELLED",method="/v1/chat/completions"\} (\S+)$'
    found = re.search(sample, stack.get("router", "/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0


def test_shift_and_enter_begin_a_new_line(page: Page) -> None:
    page.can(event("Yes."), "data: [DONE]\n\n")

    page.one("#question").send_keys("one", Keys.SHIFT + Keys.ENTER + Keys.NULL, "two", Keys.ENTER)
    page.wait_status("Ready")

    assert page.browser.execute_script("return window.asked.messages")[0]["content"] == "one\ntwo"


def test_markup_in_an_answer_is_text_and_markdown_is_shown(page: Page) -> None:
    body = "".join(event(character) for character in MARKDOWN) + ": keep-alive\n\ndata: [DONE]\n\n"

    page.can(*(body[start : start + 7] for start in range(0, len(body), 7)))
    page.ask(HOSTILE)
    page.wait_status("Ready")

    assert page.browser.title == "Pagoda chat"
    assert page.find(".turn img, .turn script, .turn b") == []
    assert page.one(".turn.user .text").text == HOSTILE
    assert page.one(".text h3").text == "Heading"
    assert page.one(".text p").text == f"A bold word, an emphasis and code <b>.\n{HOSTILE}"
    assert [node.text for node in page.find(".text p strong, .text p em, .text p code")] == [
        "bold",
        "emphasis",
        "code <b>",
    ]
    assert [node.text for node in page.find(".text ul li")] == ["first", "second"]
    assert page.one(".text ol").get_attribute("start") == "3"
    assert page.one(".text pre code").text == HOSTILE
    (link,) = page.find(".text a")
    assert (link.text, link.get_attribute("href")) == ("good", "https://example.com/a?b=c")
    assert link.get_attribute("rel") == "noopener noreferrer"


def test_however_it_is_cut_an_answer_is_shown_the_same(page: Page) -> None:
    shown = []
    for pieces in ([MARKDOWN], list(MARKDOWN)):
        page.can(*map(event, pieces), "data: [DONE]\n\n")
        page.ask("Show it.")
        page.wait_status("Ready")
        shown.append(page.find(".turn.assistant .text")[-1].get_attribute("innerHTML"))

    assert shown[0] == shown[1]


def test_errors_are_shown_and_the_question_is_not_lost(page: Page) -> None:
    page.one("#system").send_keys("x")
    page.browser.execute_script("document.getElementById('system').value = 'far too long '.repeat(9000)")

    page.ask("Why?")
    page.wait_status("Ready")

    assert "at most 8192" in page.one(".turn.assistant .error").text.replace(",", "")
    assert page.one("#question").get_property("value") == "Why?"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"pieces": [event("So"), 'event: error\ndata: {"error": {"message": "gone"}}\n\n']}, "gone"),
        ({"pieces": [event("So")]}, "The connection ended before the answer did."),
        ({"pieces": ["<h1>Bad Gateway</h1>"], "status": 502}, "The server answered with HTTP 502."),
        ({"pieces": ['{"error": {"message": "busy"}}'], "status": 429}, "busy"),
    ],
)
def test_an_answer_that_fails_says_why(page: Page, answer: dict[str, Any], shown: str) -> None:
    page.can(*answer["pieces"], status=answer.get("status", 200))

    page.ask("Why?")
    page.wait_status("Ready")

    assert page.one(".turn.assistant .error").text == shown


def test_settings_that_are_wrong_ask_nothing(page: Page) -> None:
    page.set("#max-tokens", "0")

    page.ask("Why?")

    assert page.find(".turn") == []


def test_it_fits_a_telephone(page: Page) -> None:
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        page.can(event("A " + "very" * 200 + "\n```\n" + "long " * 200), "data: [DONE]\n\n")
        page.ask("Long?")
        page.wait_status("Ready")

        assert page.browser.execute_script("return document.documentElement.scrollWidth") == 360
        assert page.one("#send").is_displayed()
        assert not page.one("#system").is_displayed()
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_key_is_asked_for_where_it_is_needed(
    tiny_model_folder: Path, tmp_path: Path, browser: webdriver.Chrome
) -> None:
    key, keys_file = new_key(), tmp_path / "keys.yaml"
    keys_file.write_text(f'- {{id: acme, key_sha256: "{digest(key)}"}}')
    keys_file.chmod(0o600)
    flags = (f"--api-keys-file={keys_file}", "--block-map-address=127.0.0.1:0")
    with launched(f"--model={tiny_model_folder}", *flags) as stack:
        stack.wait_ready()
        address = stack.printed(r"chat +(http://\S+/)")
        block_map = stack.printed(r"blocks +(http://\S+/)")
        page = Page(browser, address).wait_status("An API key is needed")
        assert page.one("#block-map").get_attribute("href") == block_map

        page.one("#key").send_keys("pgd-wrong", Keys.ENTER)
        page.wait_status("no valid API key")

        page.one("#key").send_keys(key, Keys.ENTER)
        page.wait_status("Ready")
        assert not page.one("#key-form").is_displayed()
        page.set("#max-tokens", "4")
        page.ask("Say it.")
        page.wait_status("Ready")
        assert "4 output tokens" in page.one(".turn.assistant .figures").text

        Page(browser, address).wait_status("Ready")
        assert complaints(browser) == []
