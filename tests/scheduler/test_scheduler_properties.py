"""Any arrivals, cancels and failures, on pools down to one request's need."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.scheduler.fake_shard import expected_output
from tests.scheduler.harness import Harness, limits, submit


class SchedulerMachine(RuleBasedStateMachine):
    """After each step all invariants are recounted; at the end every output is what it would be alone."""

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 20),
        depth=st.integers(1, 4),
    )
    def start(
        self, num_blocks: int, block_size: int, max_num_seqs: int, spare_budget: int, depth: int
    ) -> None:
        self.depth = depth
        self.harness = Harness(
            limits(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + block_size + spare_budget,
            )
        )
        self.wanted: dict[str, tuple[list[int], int, frozenset[int]]] = {}
        self.cancelled: set[str] = set()

    @rule(data=st.data(), token=st.integers(0, 999), stops=st.booleans())
    def arrive(self, data: st.DataObject, token: int, stops: bool) -> None:
        lim = self.harness.limits
        slots = lim.num_blocks * lim.block_size
        longest = data.draw(st.sampled_from([1, 4, slots]), label="longest prompt")
        length = data.draw(st.integers(1, min(longest, slots)), label="prompt length")
        max_tokens = data.draw(st.integers(1, min(slots + 1 - length, 25)), label="max_tokens")
        prompt = [(token + index) % 1000 for index in range(length)]
        output = expected_output(prompt, max_tokens)
        stop = frozenset([output[len(output) // 2]]) if stops else frozenset[int]()
        name = f"request {len(self.wanted)}"
        self.wanted[name] = (prompt, max_tokens, stop)
        self.harness.add(submit(name, prompt, max_tokens, tuple(stop)), arrival=len(self.wanted))

    @precondition(lambda self: len(self.harness.in_flight) < self.depth)
    @rule()
    def send(self) -> None:
        unfinished = [r for r in self.harness.requests.values() if not r.finished]
        idle = not self.harness.in_flight
        plan = self.harness.send()
        if idle and unfinished:
            oldest = min(unfinished, key=lambda request: request.rank)
            assert plan, "nothing runs while requests wait"
            assert oldest in {sequence.request for sequence, _ in plan.scheduled}, "the oldest stands still"

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def receive(self) -> None:
        self.harness.receive()

    @precondition(lambda self: self.wanted)
    @rule(steps=st.integers(2, 12))
    def advance(self, steps: int) -> None:
        for _ in range(steps):
            while len(self.harness.in_flight) < self.depth and self.harness.send():
                pass
            if self.harness.in_flight:
                self.harness.receive()

    @precondition(lambda self: self.harness.scheduler.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        request = self.harness.requests[name]
        if not request.finished:
            self.cancelled.add(name)
            self.harness.scheduler.finish(request.sequences[0])
            self.harness.scheduler.check()

    @precondition(lambda self: self.harness.in_flight)
    @rule(luck=st.integers(0, 3))
    def lose_the_shard(self, luck: int) -> None:
        if not luck:
            self.harness.fail()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        assert self.harness.scheduler.pool.num_used == 0
        for name, (prompt, max_tokens, stop) in self.wanted.items():
            expected = expected_output(prompt, max_tokens, stop)
            got = self.harness.outputs[name]
            if name in self.cancelled:
                assert got == expected[: len(got)]
            else:
                assert got == expected


SchedulerMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase
