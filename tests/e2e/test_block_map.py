"""The block map in a real browser, over a real stack; and over fakes of sizes that no test can serve."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from pagoda.scheduler.v1 import scheduler_pb2 as pb
from pagoda.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from pagoda.v1 import inference_pb2
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from router.block_map import serve_block_map
from tests.e2e.browser import chromium, complaints
from tests.e2e.client import Answer, spec
from tests.e2e.stack import Stack, launched, until
from tests.router.fake_block_maps import FakeBlockMaps

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 128
HOSTILE = "<img src=x onerror=alert(1)>"
# Of each sequence that holds blocks, whether its colour is somewhere in the grid.
COLOURS_ARE_DRAWN = """
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const grid = document.getElementById("device");
  const { data } = grid.getContext("2d").getImageData(0, 0, grid.width, grid.height);
  const drawn = new Set(new Uint32Array(data.buffer));
  const swatches = [...document.querySelectorAll("#queues .swatch")].filter((node) => node.style.background);
  return swatches.map((node) => {
    probe.fillStyle = getComputedStyle(node).backgroundColor;
    probe.fillRect(0, 0, 1, 1);
    return drawn.has(new Uint32Array(probe.getImageData(0, 0, 1, 1).data.buffer)[0]);
  });
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


class Page:
    """The block map, as a reader finds it."""

    def __init__(self, browser: webdriver.Chrome, address: str) -> None:
        self.browser = browser
        complaints(browser)
        browser.get(address)
        self.wait(lambda: self.text("status") == "Live")

    def text(self, element: str) -> str:
        """Rendered or scrolled out of view."""
        value = self.browser.find_element(By.ID, element).get_property("textContent")
        return str(value)

    def number(self, element: str) -> int:
        return int(self.text(element).replace(",", ""))

    def wait(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        until(condition, timeout_s)

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def sequences(self) -> list[str]:
        return [node.text for node in self.find("#queues .name")]

    def select(self, sequence: str) -> None:
        names = self.find("#queues button.sequence")
        next(node for node in names if node.find_element(By.CLASS_NAME, "name").text == sequence).click()

    def table(self) -> list[tuple[int, int, str]]:
        """Logical block, physical block, how full."""
        rows = self.browser.execute_script(
            "return [...document.querySelectorAll('#rows tr')].map(r => [...r.cells].map(c => c.textContent))"
        )
        return [(int(logical), int(physical), filled) for logical, physical, filled in rows]


@pytest.fixture(scope="module")
def served(tiny_model_folder: Path) -> Iterator[tuple[Stack, str]]:
    flags = (f"--num-gpu-blocks-override={NUM_BLOCKS}", "--block-map-address=127.0.0.1:0")
    with launched(f"--model={tiny_model_folder}", *flags) as stack:
        stack.wait_ready()
        yield stack, stack.printed(r"blocks +(http://\S+/)")


@pytest.fixture
def stack(served: tuple[Stack, str]) -> Stack:
    return served[0]


@pytest.fixture
def page(served: tuple[Stack, str], browser: webdriver.Chrome) -> Iterator[Page]:
    yield Page(browser, served[1])
    assert complaints(browser) == []


@pytest.fixture
def stub(stack: Stack) -> Iterator[InferenceServiceStub]:
    with stack.channel() as channel:
        yield stack.stub(channel)


def block_map(stack: Stack) -> pb.GetBlockMapResponse:
    """From the scheduler itself."""
    words = stack.children()["router"].cmdline()
    with grpc.insecure_channel(words[words.index("--scheduler-addresses") + 1]) as channel:
        return SchedulerServiceStub(channel).GetBlockMap(pb.GetBlockMapRequest(), timeout=10)


def request(request_id: str, max_tokens: int) -> inference_pb2.GenerateSpec:
    made = spec(max_tokens=max_tokens, ignore_eos=True)
    made.request_id = request_id
    return made


@contextmanager
def standing_still(stack: Stack) -> Iterator[pb.GetBlockMapResponse]:
    """The shard stops, and with it all tables, once the scheduler has nothing more to send it."""
    shard = stack.children()["shard"]
    shard.send_signal(signal.SIGSTOP)
    try:
        seen = [pb.GetBlockMapResponse(), block_map(stack)]
        while seen[-1] != seen[-2]:
            time.sleep(0.1)
            seen.append(block_map(stack))
        yield seen[-1]
    finally:
        shard.send_signal(signal.SIGCONT)


def test_a_sequence_s_table_is_that_of_the_scheduler(
    page: Page, stack: Stack, stub: InferenceServiceStub
) -> None:
    answers = [Answer(stub, request(name, 900)).read(40) for name in ("first", HOSTILE)]
    with standing_still(stack) as truth:
        used = sum(count > 0 for count in truth.ref_counts)
        page.wait(lambda: page.number("step") == truth.step)

        assert page.number("num-used") == used > 4
        assert page.sequences() == ["first #0", f"{HOSTILE} #0"]
        assert page.browser.execute_script(COLOURS_ARE_DRAWN) == [True, True]
        for sequence in truth.sequences:
            page.select(f"{sequence.request_id} #0")
            assert page.text("table-of").startswith(f"{sequence.request_id} #0 is running")
            # Drawn in the frame after the choice.
            page.wait(lambda sequence=sequence: len(page.table()) == len(sequence.block_ids))  # type: ignore[misc]
            rows = page.table()
            assert [logical for logical, _, _ in rows] == list(range(len(sequence.block_ids)))
            assert [physical for _, physical, _ in rows] == list(sequence.block_ids)
            assert rows[0][2] == "16 of 16"
            left = sequence.num_computed_tokens - 16 * (len(rows) - 1)
            assert rows[-1][2] == f"{left} of 16"
    for answer in answers:
        answer.finish()
    page.wait(lambda: page.number("num-used") == 0)
    assert page.text("table-of") == f"{HOSTILE} #0 has ended."
    assert page.find("img") == []


def test_who_holds_a_block_is_said_to_pointer_and_keyboard(
    page: Page, stack: Stack, stub: InferenceServiceStub
) -> None:
    answer = Answer(stub, request("holder", 900)).read(20)
    with standing_still(stack) as truth:
        (sequence,) = truth.sequences
        page.wait(lambda: page.number("step") == truth.step)
        canvas = page.browser.find_element(By.ID, "device")
        block = sequence.block_ids[0]

        canvas.send_keys(Keys.ARROW_RIGHT * (block + 1))
        assert page.text("block-text").startswith(f"Block {block} is held by one table")
        assert [node.text for node in page.find("#holders .name")] == ["holder #0"]
        assert [node.text for node in page.find("#holders .figures")] == ["logical 0, 16 of 16 filled"]

        page.find("#holders button")[0].click()
        assert [physical for _, physical, _ in page.table()] == list(sequence.block_ids)

        ActionChains(page.browser).move_to_element(canvas).perform()
        assert page.text("block-text").startswith("Block ")
    answer.finish()


def test_preemptions_are_counted_and_told_as_they_happen(
    page: Page, stack: Stack, stub: InferenceServiceStub
) -> None:
    threads = [Answer(stub, request(f"r{i}", 900)).finish_in_background() for i in range(6)]
    page.wait(lambda: page.number("num-used") > NUM_BLOCKS // 2)
    for thread in threads:
        thread.join()
    truth = block_map(stack)

    assert truth.preemptions > 0
    page.wait(lambda: page.number("step") == truth.step)
    assert page.number("preemptions") == truth.preemptions
    assert page.number("evictions") == truth.evictions
    assert page.number("copies") == truth.copies
    assert "preemption" in page.text("events")


def test_the_page_recovers_when_the_router_restarts(
    served: tuple[Stack, str], browser: webdriver.Chrome
) -> None:
    stack, address = served
    page = Page(browser, address)

    stack.children()["router"].kill()

    page.wait(lambda: page.text("status").startswith("The router doesn't answer; trying again every "))
    page.wait(lambda: page.text("status") == "Live")
    assert complaints(browser) == []


def large_map(num_blocks: int, step: int = 1) -> pb.GetBlockMapResponse:
    """All but a tenth used, by sequences of up to 40 blocks that share their first."""
    used = num_blocks * 9 // 10
    tables = [range(start, min(start + 40, used)) for start in range(1, used, 40)]
    return pb.GetBlockMapResponse(
        block_size=16,
        num_blocks=num_blocks,
        ref_counts=[len(tables), *[1] * (used - 1), *[0] * (num_blocks - used)],
        cached=[block % 3 == 0 for block in range(num_blocks)],
        sequences=[
            pb.BlockMapSequence(
                request_id=f"request-{number}",
                state=pb.SEQUENCE_STATE_RUNNING,
                block_ids=[0, *table],
                num_tokens=16 * len(table) + 9,
                num_computed_tokens=16 * len(table) + 8,
            )
            for number, table in enumerate(tables)
        ],
        step=step,
    )


def test_it_shows_12000_blocks_or_3_of_the_scheduler_that_is_chosen(browser: webdriver.Chrome) -> None:
    with ExitStack() as servers:
        large, small, away = (
            servers.enter_context(FakeBlockMaps(large_map(size)).serving()) for size in (12_000, 3, 0)
        )
        away.stop()
        port = serve_block_map("127.0.0.1:0", [large.address, small.address, away.address])
        page = Page(browser, f"http://127.0.0.1:{port}")
        assert page.number("num-used") == 10_800
        assert page.number("num-shared") == 1
        assert page.number("num-free") + page.number("num-cached") == 1_200
        assert len(page.find("*")) < 2_500
        large.block_map = large_map(12_000, step=2)
        page.wait(lambda: page.number("step") == 2)

        schedulers = Select(page.browser.find_element(By.ID, "scheduler"))
        schedulers.select_by_value("2")
        page.wait(lambda: page.text("status").startswith("Scheduler: UNAVAILABLE: "))
        assert page.sequences() == []

        schedulers.select_by_value("1")
        page.wait(lambda: page.text("status") == "Live")
        assert page.text("size") == "3 blocks of 16 tokens"
        assert page.sequences() == ["request-0 #0"]
        assert complaints(browser) == []
