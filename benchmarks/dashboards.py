"""Draws the dashboards of k8s/dashboards as a server under mixed load fills them, without Grafana.

Pagoda serves with a small pool of blocks, and Prometheus beside it, as in `make dev-stack`. Clients of two
keys ask for prompts that begin alike, some for several outputs, and some leave; twice a burst queues and is
preempted. Then each panel's queries are asked as Grafana would, and each dashboard becomes a picture.
"""

import asyncio
import json
import random
import tempfile
import time
import urllib.parse
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks import models
from benchmarks.cluster import until
from benchmarks.command import BareParser, BenchmarkError, failing_in_one_line, positive_float
from benchmarks.pagoda_server import PagodaServer
from benchmarks.panels import Series, draw, filled
from benchmarks.plot import pyplot
from benchmarks.results import ROOT
from benchmarks.workload import make
from launcher.monitors import SCRAPE_INTERVAL, check_monitors
from launcher.preflight import PreflightError, claim_addresses
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from pagoda.v1.sampling_pb2 import SamplingParams
from router.auth import digest

SOURCES: Final = ROOT / "k8s" / "dashboards"
PICTURES: Final = ROOT / "docs" / "images"
# The second one meets its limits; which, depends on how fast the server is.
KEYS: Final[Sequence[dict[str, Any]]] = (
    {"id": "acme"},
    {"id": "umbrella", "max_concurrent_requests": 8, "tokens_per_minute": 6000},
)
FLAGS: Final = "--num-gpu-blocks-override 96 --swap-space 0.05 --max-num-seqs 24"
# What the load may meet: limits, and wrong keys.
EXPECTED: Final = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED)
CLIENTS, BURST = 5, 32
LEAVES, WRONG_KEY = 0.15, 0.03
SCRAPE_S: Final = int(SCRAPE_INTERVAL.removesuffix("s"))
# Points of a line, at most.
POINTS: Final = 300


class Prometheus:
    """The HTTP API of the one at `address`."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/"

    def ask(self, path: str, **parameters: str | float) -> Any:
        """What it answers as data."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
            return json.load(response)["data"]

    def watches(self) -> bool:
        """Whether every process was seen, and seen ready."""
        query = "pagoda_scheduler_shard_up == 1 and on () (sum(up) == 3)"
        try:
            return bool(self.ask("query", query=query)["result"])
        except OSError:
            return False

    def find(self, query: str, start: float, end: float) -> list[Series]:
        """A panel's query over a time; points are in seconds after `start`."""
        step = max(SCRAPE_S, round((end - start) / POINTS))
        query = filled(query, max(step + SCRAPE_S, 4 * SCRAPE_S))
        found = self.ask("query_range", query=query, start=start, end=end, step=step)["result"]
        return [(one["metric"], [(at - start, float(value)) for at, value in one["values"]]) for one in found]


class Load:
    """Asks the server at `address`. Prompts are of tokens, so that any model will do."""

    def __init__(self, address: str, vocab_size: int, seed: int) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = InferenceServiceStub(self._channel)
        self._rng = random.Random(seed)  # noqa: S311
        self._beginnings = [one.prompt for one in make([(96, 1)] * 3, vocab_size, seed)]
        self._vocab_size = vocab_size

    async def run(self, seconds: float) -> None:
        """A few clients all the time, and two bursts."""
        async with self._channel:
            ends_at = time.monotonic() + seconds
            await asyncio.gather(self._bursts(seconds), *(self._client(ends_at) for _ in range(CLIENTS)))

    async def _client(self, ends_at: float) -> None:
        while time.monotonic() < ends_at:
            await asyncio.sleep(self._rng.expovariate(2))
            await self._ask()

    async def _bursts(self, seconds: float) -> None:
        for _ in range(2):
            await asyncio.sleep(seconds / 3)
            await asyncio.gather(*(self._ask() for _ in range(BURST)))

    async def _ask(self) -> None:
        rng = self._rng
        (own,) = make([(rng.randint(8, 64), rng.randint(16, 128))], self._vocab_size, rng.getrandbits(32))
        request = pb.GenerateSpec(
            token_ids=pb.TokenIds(ids=[*rng.choice(self._beginnings), *own.prompt]),
            sampling=SamplingParams(temperature=1),
            stop=pb.StopConditions(max_tokens=own.max_tokens),
            n=rng.choice((1, 1, 1, 3)),
        )
        key = "wrong" if rng.random() < WRONG_KEY else rng.choice(KEYS)["id"]
        leaves = rng.random() < LEAVES
        call = self._stub.GenerateStream(
            pb.GenerateStreamRequest(spec=request), metadata=(("authorization", f"Bearer {key}"),)
        )
        try:
            async for event in call:
                if leaves and event.delta.token_ids:
                    call.cancel()
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() not in EXPECTED:
                raise BenchmarkError(f"the server answered {error.code().name}: {error.details()}") from None


def parse(arguments: Sequence[str] | None) -> Namespace:
    """Flags."""
    parser = BareParser("dashboards", __doc__)
    models.add_flags(parser)
    parser.add_argument("--seconds", type=positive_float, default=150.0, help="how long there is load")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked")
    parser.add_argument("--output", type=Path, default=PICTURES, help="folder for dashboard-*.png")
    return parser.parse_args(arguments)


async def watch(options: Namespace, model: models.Model, prometheus: Prometheus, server: str) -> float:
    """Puts the load on a watched server, and returns when it began."""
    await until(prometheus.watches, "Prometheus doesn't see every process")
    began = time.time()
    await Load(server, model.vocab_size, options.seed).run(options.seconds)
    # Until the last of it was scraped, and rules were evaluated.
    await asyncio.sleep(2 * SCRAPE_S + 1)
    return began


def run(options: Namespace) -> None:
    """Prints a line per dashboard."""
    pyplot()  # missing, it should be missed now
    try:
        check_monitors({"prometheus-address": "127.0.0.1:0", "grafana-address": None})
        address = claim_addresses({"prometheus-address": "127.0.0.1:0"})["prometheus-address"]
    except PreflightError as error:
        raise BenchmarkError(str(error)) from None
    model = models.find(options)
    options.output.mkdir(parents=True, exist_ok=True)
    prometheus = Prometheus(address)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(json.dumps([{**key, "key_sha256": digest(key["id"])} for key in KEYS]))
        keys.chmod(0o600)
        flags = f"{FLAGS} --api-keys-file {keys} --prometheus-address {address}"
        flags += f" --served-model-name {model.name} --device {options.device} --dtype {options.dtype}"
        server = PagodaServer(model.folder, flags, "pagoda-dashboards")
        try:
            began = asyncio.run(watch(options, model, prometheus, server.address))
            ended = time.time()
            for source in sorted(SOURCES.glob("*.json")):
                picture = options.output / f"{source.stem.replace('pagoda', 'dashboard')}.png"
                dashboard = json.loads(source.read_text())
                empty = draw(
                    dashboard, lambda query: prometheus.find(query, began, ended), ended - began, picture
                )
                line = {"dashboard": source.stem, "panels": len(dashboard["panels"]), "empty": empty}
                print(json.dumps({**line, "picture": str(picture)}), flush=True)
        finally:
            server.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws all of them."""
    options = parse(arguments)
    with failing_in_one_line("python -m benchmarks.dashboards"):
        run(options)


if __name__ == "__main__":
    main()
