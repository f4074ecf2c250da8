import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from common import logs

log = logging.getLogger("router.test")


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_json_line_has_its_members(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "info", "json")

    log.warning("%d requests wait", 3, extra=logs.fields(request_id="a", tenant="t"))

    line = json.loads(printed(capsys))
    assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta(0)
    assert line == {
        "level": "warning",
        "process": "router",
        "logger": "router.test",
        "message": "3 requests wait",
        "request_id": "a",
        "tenant": "t",
    }


def test_a_json_record_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "info", "json")

    try:
        raise ValueError("two\nlines\u2028and\r\nmore")
    except ValueError:
        log.exception("it\nbroke")

    (line,) = printed(capsys).splitlines()
    assert json.loads(line)["message"] == "it\nbroke"
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_text_ends_with_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "info", "text")

    log.info("done", extra=logs.fields(request_id="a-1", name='b "c"\n', count=2))

    assert (
        printed(capsys).partition(" ")[2] == 'router INFO done request_id=a-1 name="b \\"c\\"\\n" count=2\n'
    )


def test_text_shows_a_traceback_after_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "info", "text")

    try:
        raise ValueError("no")
    except ValueError:
        log.exception("broke", extra=logs.fields(request_id="a"))

    first, *rest = printed(capsys).splitlines()
    assert first.endswith("ERROR broke request_id=a")
    assert rest[-1] == "ValueError: no"


async def test_bound_fields_are_those_of_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "info", "json")
    met = asyncio.Barrier(2)

    async def request(name: str) -> None:
        logs.bind(request_id=name)
        await met.wait()
        log.info(name)

    await asyncio.gather(request("a"), request("b"))
    log.info("neither")

    lines = [json.loads(line) for line in printed(capsys).splitlines()]
    assert {line["message"]: line.get("request_id") for line in lines} == {
        "a": "a",
        "b": "b",
        "neither": None,
    }


def test_a_lower_level_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", "warning", "json")

    log.info("unheard")

    assert printed(capsys) == ""
