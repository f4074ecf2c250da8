"""Long random walks: denser in preemptions, forks and swaps than what hypothesis finds step by step."""

import random
from collections import Counter

import pytest

from scheduler.invariants import check
from tests.scheduler.harness import Harness, limits
from tests.scheduler.test_scheduler_properties import Wanted

WALKS = 100


class Walk:
    """Requests come and go at random; after each step invariants are recounted."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice, integer = self.random.choice, self.random.randint
        self.num_seqs = integer(1, 6)
        block_size = integer(1, 4)
        self.harness = Harness(
            limits(
                num_blocks=integer(1, 20),
                block_size=block_size,
                max_num_seqs=self.num_seqs,
                max_num_batched_tokens=self.num_seqs + block_size + integer(0, 20),
                num_host_blocks=choice([0, 3, 40]),
                preemption_mode=choice(["auto", "recompute", "swap"]),
                prefix_caching=self.random.random() < 0.7,
            )
        )
        self.depth = integer(1, 4)
        self.wanted: dict[str, Wanted] = {}
        self.cancelled: set[str] = set()

    def run(self) -> None:
        actions = [self.arrive, self.send, self.advance, self.cancel, self.lose_the_shard, self.flush]
        for _ in range(self.random.randint(5, 80)):
            (action,) = self.random.choices(actions, weights=[35, 25, 25, 10, 3, 2])
            action()
        self.harness.run()
        self.check_outputs()

    def arrive(self) -> None:
        lim, integer = self.harness.limits, self.random.randint
        kind = self.random.choice(["one", "several", "several", "beams", "beams"])
        width = 1 if kind == "one" else integer(1, self.num_seqs)
        slots = lim.num_blocks // width * lim.block_size
        if not slots:
            return
        length = integer(1, min(self.random.choice([1, 4, 9, slots]), slots))
        max_tokens = integer(1, min(slots + 1 - length, 25))
        start = 100 * integer(0, 2)
        prompt = [(start + index) % 1000 for index in range(length)]
        beam_width = width if kind == "beams" else 0
        n = integer(1, width) if beam_width else width
        stop = frozenset[int]()
        if self.random.random() < 0.3:
            output = Wanted(prompt, max_tokens, stop, 1, beam_width).outputs()[0]
            stop = frozenset([output[len(output) // 2]])
        name = f"request {len(self.wanted)}"
        prompt_logprobs = self.random.choice([None, None, 0])
        min_tokens = self.random.choice([0, integer(0, max_tokens)]) if stop else 0
        wanted = Wanted(prompt, max_tokens, stop, n, beam_width, prompt_logprobs, min_tokens)
        self.wanted[name] = wanted
        self.harness.add(wanted.message(name), arrival=len(self.wanted))

    def send(self) -> None:
        if len(self.harness.in_flight) < self.depth:
            self.harness.send_and_watch()

    def advance(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            while len(self.harness.in_flight) < self.depth and self.harness.send():
                pass
            if self.harness.in_flight:
                self.harness.receive()

    def cancel(self) -> None:
        live = [name for name, request in self.harness.requests.items() if not request.finished]
        if not live:
            return
        name = self.random.choice(live)
        request = self.harness.requests[name]
        self.cancelled.add(name)
        sequences = list(request.sequences)
        if not request.beams and self.random.random() < 0.5:
            sequences = sequences[:1]
        for sequence in sequences:
            self.harness.scheduler.finish(sequence)
            check(self.harness.scheduler)

    def lose_the_shard(self) -> None:
        self.harness.fail()

    def flush(self) -> None:
        self.harness.scheduler.blocks.device.flush()
        check(self.harness.scheduler)

    def check_outputs(self) -> None:
        assert self.harness.scheduler.blocks.device.num_used == 0
        assert self.harness.scheduler.blocks.host.num_used == 0
        for name, wanted in self.wanted.items():
            for index, expected in enumerate(wanted.outputs()):
                got = self.harness.all_outputs[name, index]
                assert got == (expected[: len(got)] if name in self.cancelled else expected), (name, index)
            known, reported = wanted.known_prompt(), self.harness.prompt_logprobs.get(name, [])
            assert reported == (known[: len(reported)] if name in self.cancelled else known), name


@pytest.mark.parametrize("batch", range(10))
def test_outputs_are_those_of_unlimited_memory(batch: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(batch * WALKS, (batch + 1) * WALKS):
        walk = Walk(seed)
        walk.run()
        totals.update(vars(walk.harness.scheduler.totals))
    # Else the walk shows nothing.
    for name in ("copies", "evictions", "hit_tokens", "recomputes", "swapped_out"):
        assert totals[name] > 0, name
