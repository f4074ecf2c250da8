"""The simulated servers: each request finishes once, within the memory, and the cost model adds up."""

import pytest

from benchmarks.baselines import ReservingServer
from benchmarks.cost_model import CostModel
from benchmarks.measurements import Histogram
from benchmarks.sustainable import BASELINES, Machine, Search
from benchmarks.traces import TRACES, Run, Trace, TraceRequest
from scheduler.limits import Limits


def machine(num_blocks: int = 200, num_host_blocks: int = 0, mode: str = "auto") -> Machine:
    limits = Limits(num_blocks, 16, 64, 1024, 2048, 1 << 31, num_host_blocks, mode)
    return Machine(limits, CostModel())


def one(prompt: int, output: int, n: int = 1) -> Trace:
    return [TraceRequest(0.0, (Run(1, prompt),), 2, output, n)]


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("server", ["paged", *BASELINES])
def test_every_request_finishes_once(server: str, trace: str) -> None:
    # Each of four outputs may reserve the whole of max_model_len.
    where = machine(num_blocks=600)
    asked = TRACES[trace](64, 20.0, 0)

    measured = where.server(server).run(asked)

    assert dict(measured.finishes) == dict.fromkeys(range(len(asked)), 1)
    assert measured.output_tokens == sum(request.output_length * request.n for request in asked)
    sequences = sum(request.n for request in asked)
    assert measured.ttft.count == sequences
    assert measured.itl.count == measured.output_tokens - sequences
    assert 0 < measured.peak_slots <= 600 * 16


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_requests_survive_preemption(mode: str) -> None:
    where = machine(num_blocks=130, num_host_blocks=130, mode=mode)
    asked = TRACES["sharegpt-like"](100, 50.0, 0)

    server = where.paged()
    measured = server.run(asked)

    assert server.totals.preemptions > 10
    assert bool(server.totals.swaps) == (mode == "swap")
    assert dict(measured.finishes) == dict.fromkeys(range(100), 1)


@pytest.mark.parametrize("name", ["paged", "continuous-oracle"])
def test_a_lone_request_costs_its_steps(name: str) -> None:
    cost = CostModel(fixed_s=1.0, per_token_s=0.1, per_kv_token_s=0.01)
    where = Machine(machine().limits, cost)

    measured = where.server(name).run(one(prompt=40, output=3))

    # The prompt, then two decodes, which read one token more each.
    expected = (1 + 4.0 + 0.40) + (1 + 0.1 + 0.41) + (1 + 0.1 + 0.42)
    assert measured.end_s == pytest.approx(expected)
    assert measured.ttft.percentile(50) == pytest.approx(5.4, rel=0.01)
    assert measured.normalised_latency == pytest.approx(expected / 3)


def test_static_batches_start_when_the_last_one_has_ended() -> None:
    trace = [*one(10, 100), TraceRequest(0.5, (Run(1, 10),), 2, 1)]
    cost = CostModel(1.0, 0.0, 0.0)

    def end_of_second(continuous: bool) -> float:
        server = ReservingServer(1000, 8, lambda request: 200, cost, continuous)
        return server.run(trace).ttft.percentile(100)

    assert end_of_second(continuous=True) == pytest.approx(1.5, rel=0.01)
    assert end_of_second(continuous=False) == pytest.approx(100.5, rel=0.01)


def test_what_never_fits_is_said() -> None:
    server = ReservingServer(100, 8, lambda request: 101, CostModel())

    with pytest.raises(ValueError, match="request 0 does not fit 100 slots"):
        server.run(one(10, 10))


def test_paging_sustains_twice_the_rate_of_reserving_the_most() -> None:
    where = machine(num_blocks=981)
    search = Search(lambda rate: TRACES["sharegpt-like"](150, rate, 0), bound_s=0.05, precision=0.1)

    paged = search.find(lambda: where.server("paged"))
    reserving = search.find(lambda: where.server("continuous-max"))

    assert paged.normalised_latency_s <= 0.05
    assert paged.rate >= 2 * reserving.rate


def test_a_bound_that_nobody_meets_is_said() -> None:
    search = Search(lambda rate: TRACES["alpaca-like"](5, rate, 0), bound_s=0.001)

    with pytest.raises(ValueError, match="no rate"):
        search.find(lambda: machine().server("continuous-oracle"))


def test_percentiles() -> None:
    histogram = Histogram()
    histogram.add(0.1, 90)
    histogram.add(2.0, 10)

    assert histogram.percentile(50) == pytest.approx(0.1, rel=0.01)
    assert histogram.percentile(99) == pytest.approx(2.0, rel=0.01)
    assert Histogram().percentile(50) == 0
