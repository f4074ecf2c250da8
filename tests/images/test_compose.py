"""images/compose.yaml, as far as it can be checked without an engine."""

import re
from typing import Any

import pytest
import yaml

from common.config import load
from tests.docs.generate import CONFIGS
from tests.images.build import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "images/compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
# What a variable is where it isn't set; one that has to be is a path.
VARIABLE = re.compile(r"\$\{\w+:[-?]([^}]*)\}")


def words(name: str) -> list[str]:
    return [VARIABLE.sub(r"\1", word) for word in SERVICES[name]["command"]]


@pytest.mark.parametrize("name", ["router", "scheduler", "shard"])
def test_processes_take_their_flags(name: str) -> None:
    given = words(name)
    if "--" in given:
        border = given.index("--")
        load(CONFIGS["ranks"], "ranks", given[4:border], environ={})
        given = [*given[:3], *given[border + 1 :]]

    load(CONFIGS[name], name, given[3:], environ={})


def test_prometheus_asks_every_process() -> None:
    settings = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])

    targets = {one["job_name"]: one["static_configs"][0]["targets"] for one in settings["scrape_configs"]}
    ports = {
        name: int(next(word for word in words(name) if "metrics-address" in word).rpartition(":")[2])
        for name in ("router", "scheduler", "shard")
    }
    assert targets == {
        "pagoda-router": [f"router:{ports['router']}"],
        "pagoda-scheduler": [f"scheduler:{ports['scheduler']}"],
        # The first rank's, after that of all together.
        "pagoda-shard": [f"scheduler:{ports['shard'] + 1}"],
    }


def test_every_file_that_is_given_to_a_service_is_there() -> None:
    used = {one["source"] for service in SERVICES.values() for one in service.get("configs", [])}

    assert used == COMPOSE["configs"].keys()


def test_a_gpu_goes_to_a_service_that_is_there() -> None:
    with_gpu = yaml.safe_load((ROOT / "images/compose.gpu.yaml").read_text())["services"]

    (name,) = with_gpu.keys() & SERVICES.keys()
    (device,) = with_gpu[name]["deploy"]["resources"]["reservations"]["devices"]
    assert (name, device["capabilities"]) == ("shard", ["gpu"])


def test_nothing_is_open_to_other_machines() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
