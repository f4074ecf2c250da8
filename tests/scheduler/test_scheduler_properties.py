"""Any arrivals, forks, beams, cancels, swaps and failures, on pools down to one request's need."""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagoda.scheduler.v1.scheduler_pb2 import Submit
from pagoda.v1.sampling_pb2 import PositionLogprobs
from scheduler.beam_search import BeamSearch
from scheduler.invariants import check
from tests.scheduler.fake_shard import expected_beams, expected_output, prompt_logprob
from tests.scheduler.harness import Harness, limits, submit


@dataclass(frozen=True)
class Wanted:
    """A request that was made."""

    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    n: int
    beam_width: int
    prompt_logprobs: int | None = None
    min_tokens: int = 0

    def message(self, name: str) -> Submit:
        return submit(
            name,
            self.prompt,
            self.max_tokens,
            tuple(self.stop),
            self.n,
            self.beam_width,
            prompt_logprobs=self.prompt_logprobs,
            min_tokens=self.min_tokens,
        )

    def known_prompt(self) -> list[PositionLogprobs]:
        """The log-probabilities of its prompt, if they are wanted."""
        known = range(1, len(self.prompt)) if self.prompt_logprobs is not None else ()
        return [prompt_logprob(self.prompt, position) for position in known]

    def outputs(self) -> list[list[int]]:
        """What it gives when it runs alone, with unlimited memory."""
        if self.beam_width:
            search = BeamSearch(self.beam_width, 1, False, self.stop, self.max_tokens, self.min_tokens)
            return expected_beams(self.prompt, search)[: self.n]
        return [
            expected_output(self.prompt, self.max_tokens, self.stop, index, self.min_tokens)
            for index in range(self.n)
        ]


class SchedulerMachine(RuleBasedStateMachine):
    """After each step all invariants are recounted; at the end every output is what it would be alone."""

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 20),
        depth=st.integers(1, 4),
        num_host_blocks=st.sampled_from([0, 2, 30]),
        mode=st.sampled_from(["auto", "recompute", "swap"]),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_budget: int,
        depth: int,
        num_host_blocks: int,
        mode: str,
        prefix_caching: bool,
    ) -> None:
        self.depth = depth
        self.harness = Harness(
            limits(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + block_size + spare_budget,
                num_host_blocks=num_host_blocks,
                preemption_mode=mode,
                prefix_caching=prefix_caching,
            )
        )
        self.wanted: dict[str, Wanted] = {}
        self.cancelled: set[str] = set()

    @rule(
        data=st.data(),
        token=st.integers(0, 2),
        stops=st.booleans(),
        kind=st.sampled_from("111nnb"),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def arrive(
        self, data: st.DataObject, token: int, stops: bool, kind: str, prompt_logprobs: int | None
    ) -> None:
        lim = self.harness.limits
        width = 1 if kind == "1" else data.draw(st.integers(1, lim.max_num_seqs), label="sequences")
        beam_width = width if kind == "b" else 0
        n = data.draw(st.integers(1, width), label="n") if beam_width else width
        slots = lim.num_blocks // width * lim.block_size
        if not slots:
            return
        longest = data.draw(st.sampled_from([1, 4, 9, slots]), label="longest prompt")
        length = data.draw(st.integers(1, min(longest, slots)), label="prompt length")
        max_tokens = data.draw(st.integers(1, min(slots + 1 - length, 25)), label="max_tokens")
        # Few different prompts, so that prefixes meet.
        prompt = [(token * 100 + index) % 1000 for index in range(length)]
        stop = frozenset[int]()
        if stops:
            output = Wanted(prompt, max_tokens, stop, 1, beam_width).outputs()[0]
            stop = frozenset([output[len(output) // 2]])
        name = f"request {len(self.wanted)}"
        min_tokens = data.draw(st.integers(0, max_tokens), label="min_tokens") if stops else 0
        wanted = Wanted(prompt, max_tokens, stop, n, beam_width, prompt_logprobs, min_tokens)
        self.wanted[name] = wanted
        self.harness.add(wanted.message(name), arrival=len(self.wanted))

    @precondition(lambda self: len(self.harness.in_flight) < self.depth)
    @rule()
    def send(self) -> None:
        self.harness.send_and_watch()

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
        if request.finished:
            return
        self.cancelled.add(name)
        sequences = list(request.sequences)
        if not request.beams and data.draw(st.booleans(), label="one output"):
            sequences = sequences[:1]
        for sequence in sequences:
            self.harness.scheduler.finish(sequence)
            check(self.harness.scheduler)

    @precondition(lambda self: self.harness.in_flight)
    @rule(luck=st.integers(0, 3))
    def lose_the_shard(self, luck: int) -> None:
        if not luck:
            self.harness.fail()

    @rule()
    def flush_the_cache(self) -> None:
        self.harness.scheduler.blocks.device.flush()
        check(self.harness.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        assert self.harness.scheduler.blocks.device.num_used == 0
        assert self.harness.scheduler.blocks.host.num_used == 0
        for name, wanted in self.wanted.items():
            for index, expected in enumerate(wanted.outputs()):
                got = self.harness.all_outputs[name, index]
                if name in self.cancelled:
                    assert got == expected[: len(got)]
                else:
                    assert got == expected
            known, reported = wanted.known_prompt(), self.harness.prompt_logprobs.get(name, [])
            assert reported == (known[: len(reported)] if name in self.cancelled else known)


SchedulerMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase
