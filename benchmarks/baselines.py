"""Servers without paging, on the same memory and cost model: a request reserves one contiguous piece.

They are better than real ones: reserving never fails for want of a *contiguous* piece, and a sequence that
has ended costs nothing more.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.arrivals import ArrivalQueue
from benchmarks.cost_model import CostModel
from benchmarks.measurements import Measurements
from benchmarks.traces import Trace, TraceRequest

# Token slots that one sequence of a request reserves.
Reserve = Callable[[TraceRequest], int]


def reserve_max(max_model_len: int) -> Reserve:
    """As many as a request may ever take ("Max" in the paper, section 6.1)."""
    return lambda request: max_model_len


def reserve_pow2(request: TraceRequest) -> int:
    """The prompt, and the output's length rounded up to a power of two ("Pow2")."""
    return request.prompt_length + (1 << (request.output_length - 1).bit_length())


def reserve_oracle(request: TraceRequest) -> int:
    """Exactly what it will take, as if that were known beforehand ("Oracle")."""
    return request.prompt_length + request.output_length


@dataclass(order=True)
class _Running:
    """A request under way, ordered by the step in which its last token comes."""

    last_step: int
    index: int
    arrival_s: float = field(compare=False)


class ReservingServer:
    """Batches requests whose reservations fit `num_slots` token slots, first come, first served.

    `continuous` lets a request join and leave between steps, as Orca does; else a batch is filled once, and
    the next one starts when its longest request has ended. A prompt is computed in one step, once for all
    `n` outputs; each output holds its own copy.
    """

    def __init__(
        self, num_slots: int, max_num_seqs: int, reserve: Reserve, cost: CostModel, continuous: bool = True
    ) -> None:
        self._num_slots = num_slots
        self._max_num_seqs = max_num_seqs
        self._reserve = reserve
        self._cost = cost
        self._continuous = continuous

    def run(self, trace: Trace) -> Measurements:
        """Serves the trace to its end."""
        measured = Measurements()
        arrivals = ArrivalQueue(trace)
        waiting: deque[tuple[float, int]] = deque()
        running: list[_Running] = []
        now = 0.0
        sequences = reserved = kv_tokens = 0
        while True:
            waiting.extend(arrivals.until(now))
            joining: list[tuple[float, int]] = []
            prompt_tokens = 0
            decoding = sequences
            if self._continuous or not running:
                while waiting and self._fits(trace[waiting[0][1]], sequences, reserved):
                    joining.append(waiting.popleft())
                    arrival, index = joining[-1]
                    request = trace[index]
                    heapq.heappush(
                        running, _Running(measured.steps + request.output_length - 1, index, arrival)
                    )
                    sequences += request.n
                    reserved += request.n * self._reserve(request)
                    kv_tokens += request.n * request.prompt_length
                    prompt_tokens += request.prompt_length
            if not running:
                if waiting:
                    raise ValueError(f"request {waiting[0][1]} does not fit {self._num_slots} slots")
                if (next_s := arrivals.next_s) is None:
                    return measured
                now = max(now, next_s)
                continue
            # Each decode writes the token that the step before sampled.
            kv_tokens += decoding
            step_s = self._cost.step_s(decoding + prompt_tokens, kv_tokens)
            now += step_s
            measured.hold(reserved, reserved - kv_tokens)
            measured.sequence_steps += sequences
            measured.itl.add(step_s, decoding)
            for arrival, index in joining:
                measured.ttft.add(now - arrival, trace[index].n)
            while running and running[0].last_step == measured.steps:
                ended = heapq.heappop(running)
                request = trace[ended.index]
                sequences -= request.n
                reserved -= request.n * self._reserve(request)
                # The last token is never computed.
                kv_tokens -= request.n * (request.prompt_length + request.output_length - 1)
                measured.finish(ended.index, request, ended.arrival_s, now)
                arrivals.finished(ended.index, now)
            measured.steps += 1

    def _fits(self, request: TraceRequest, sequences: int, reserved: int) -> bool:
        slots = reserved + request.n * self._reserve(request)
        return slots <= self._num_slots and sequences + request.n <= self._max_num_seqs
