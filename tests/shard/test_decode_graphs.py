"""Decode steps padded to the sizes of graphs compute what they compute alone."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda.shard.v1.shard_pb2 import (
    BlockCopy,
    BlockUpdate,
    ConfigureRequest,
    ExecuteRequest,
    ExecuteResponse,
    Fork,
    Join,
    NextToken,
    Scheduled,
)
from pagoda.v1.sampling_pb2 import SamplingParams
from shard.decode_graphs import CudaCapture, DecodeGraphs, batch_sizes
from shard.executor import StepExecutor
from shard.model_config import load_model_config
from shard.weights import load_model
from tests.oracle import VOCAB_SIZE, random_tokens, tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 8
# All log-probabilities, so that results show what the logits were.
EVERYTHING = SamplingParams(temperature=0, top_p=1, repetition_penalty=1, logprobs=VOCAB_SIZE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 7}),
}


@pytest.mark.parametrize("limit", [1, 3, 8, 20, 256, 10_000])
def test_sizes_are_few_and_close(limit: int) -> None:
    sizes = batch_sizes(limit)

    assert sizes[0] == 1
    assert sizes[-1] == min(limit, 256)
    assert len(sizes) <= 35
    assert all(0 < after - before <= max(8, before) for before, after in pairwise(sizes))


class Recorder:
    """Stands for a capture: does the work when asked to, and counts."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed: list[int] = []

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        number = self.captured
        self.captured += 1

        def replay() -> None:
            self.replayed.append(number)
            work()

        return replay


def test_a_batch_is_padded_to_the_next_size() -> None:
    recorder, ready = Recorder(), []

    def decode(slots: Tensor, seq_lens: Tensor, host_seq_lens: object) -> Tensor:
        return torch.stack((slots, seq_lens), dim=1).float()

    inputs = torch.zeros(16, dtype=torch.int64)
    graphs = DecodeGraphs(decode, inputs, [1, 2, 4], 2, recorder, lambda: ready.append(1))
    inputs[:8] = torch.tensor([7, 5, 6, 0, 30, 10, 20, 0])

    assert [graphs.padded_size(count) for count in range(1, 6)] == [1, 2, 4, 4, None]
    assert graphs.replay([30, 10, 20, 0]).tolist() == [[7, 30], [5, 10], [6, 20], [0, 0]]
    # The largest was the first.
    assert (recorder.replayed, len(ready)) == ([0], 3)


def executors(
    folder: Path, device: torch.device, start_capture: Callable[[], Any]
) -> tuple[StepExecutor, StepExecutor]:
    """One that runs eagerly, and one with graphs; of each other they know nothing."""

    def one(start_capture: Callable[[], Any] | None) -> StepExecutor:
        model = load_model(folder, load_model_config(folder), torch.float32, device, 128).prepare()
        executor = StepExecutor(model, torch.float32, device, start_capture)
        executor.configure(
            ConfigureRequest(
                epoch=1,
                num_blocks=60,
                block_size=BLOCK_SIZE,
                max_num_seqs=12,
                max_num_batched_tokens=128,
                max_model_len=64,
            )
        )
        return executor

    return one(None), one(start_capture)


def join(slot: int, tokens: list[int], first_block: int, computed: int = 0) -> Join:
    blocks = range(first_block, first_block + 5)
    return Join(
        slot=slot,
        token_ids=tokens,
        prompt_length=len(tokens),
        computed_length=computed,
        block_ids=[*reversed(blocks)],
        sampling=EVERYTHING,
    )


def scheduled(*slots: int, tokens: int = 1) -> list[Scheduled]:
    return [Scheduled(slot=slot, num_tokens=tokens) for slot in slots]


def life() -> Iterator[ExecuteRequest]:
    """Sequences that come, go, fork and come back elsewhere."""
    slots = [9, 2, 11, 4, 0, 7, 3]
    prompts = {slot: random_tokens(3 + slot, seed=slot) for slot in slots}
    yield ExecuteRequest(
        joins=[join(slot, prompts[slot], 5 * index) for index, slot in enumerate(slots)],
        scheduled=[Scheduled(slot=slot, num_tokens=len(prompts[slot])) for slot in slots],
    )
    # Sizes between those of the graphs, and slots in other orders.
    yield ExecuteRequest(scheduled=scheduled(9, 2, 11, 4, 0, 7, 3))
    yield ExecuteRequest(scheduled=scheduled(3, 0, 9))
    yield ExecuteRequest(scheduled=scheduled(7, 11, 4, 2, 3))
    yield ExecuteRequest(leaves=[2, 9], scheduled=scheduled(11, 7))
    # One is paused and comes back in another slot, with other blocks, beside decodes and by itself.
    resumed = join(5, random_tokens(9, seed=50), 35)
    yield ExecuteRequest(
        joins=[resumed], scheduled=[*scheduled(11, 7), Scheduled(slot=5, num_tokens=8), *scheduled(4)]
    )
    # A last chunk of one token; another that doesn't reach its last one.
    yield ExecuteRequest(joins=[join(9, random_tokens(4, seed=51), 40)], scheduled=scheduled(9, 5, 4, 3))
    forked = join(1, [], 0, computed=10)
    forked.prompt_length = 9
    forked.block_ids[:] = [39, 38]
    yield ExecuteRequest(
        scheduled=scheduled(7, 5, 11),
        forks=[Fork(source_slot=5, targets=[forked])],
    )
    yield ExecuteRequest(
        block_updates=[BlockUpdate(slot=1, start=1, block_ids=[47, 46])],
        copies=[BlockCopy(source=38, destination=47)],
        next_tokens=[NextToken(slot=1, token_id=3), NextToken(slot=7, token_id=8)],
        scheduled=scheduled(1, 7, 0, 5),
    )


def assert_same(result: ExecuteResponse, expected: ExecuteResponse) -> None:
    assert [one.slot for one in result.sampled] == [one.slot for one in expected.sampled]
    for one, other in zip(result.sampled, expected.sampled, strict=True):
        assert one.token_id == other.token_id
        logprobs, others = (
            torch.tensor([top.logprob for top in sorted(sampled.logprobs.top, key=lambda top: top.token_id)])
            for sampled in (one, other)
        )
        torch.testing.assert_close(logprobs, others, atol=1e-4, rtol=0)


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, config = MODELS[request.param]
    tiny_model(tmp_path, family, **config)
    return tmp_path


def test_padded_steps_equal_eager_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The packed decoder of CPUs knows no padding.
    monkeypatch.setattr("kernels.cpu.library.load", lambda: None)
    recorder = Recorder()
    eager, padded = executors(folder, CPU, lambda: recorder)
    recorder.replayed.clear()

    for command in life():
        assert_same(padded.execute(command).to_proto(), eager.execute(command).to_proto())

    # Captured from the largest on: 12, 8, 4, 2, 1. Prefills ran eagerly.
    assert recorder.replayed == [1, 2, 1, 3, 2, 2, 2]


def test_one_token_of_a_prompt_runs_eagerly_for_its_logprobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.cpu.library.load", lambda: None)
    recorder = Recorder()
    eager, graphed = executors(folder, CPU, lambda: recorder)
    recorder.replayed.clear()
    asking = join(0, random_tokens(2), 0)
    asking.prompt_logprobs = 3
    command = ExecuteRequest(joins=[asking], scheduled=scheduled(0))

    result = graphed.execute(command).to_proto()

    assert len(result.prompt_logprobs[0].positions) == 1
    assert list(result.prompt_logprobs) == list(eager.execute(command).to_proto().prompt_logprobs)
    assert not recorder.replayed


def test_graphs_are_kept_with_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.library.load", lambda: None)
    recorders: list[Recorder] = []

    def start_capture() -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    eager, padded = executors(folder, CPU, start_capture)
    request = ConfigureRequest(
        epoch=2,
        num_blocks=60,
        block_size=BLOCK_SIZE,
        max_num_seqs=12,
        max_num_batched_tokens=128,
        max_model_len=64,
    )
    for command in life():
        padded.execute(command)
    assert padded.configure(request)
    replayed = len(recorders[0].replayed)

    for command in life():
        assert_same(padded.execute(command).to_proto(), eager.execute(command).to_proto())
    assert (len(recorders), len(recorders[0].replayed) - replayed) == (1, 7)

    # The blocks fit another length too, the graphs don't.
    request.max_model_len = 48
    assert padded.configure(request)
    assert len(recorders) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_captured_steps_equal_eager_ones(folder: Path) -> None:
    device = torch.device("cuda", 0)
    eager, captured = executors(folder, device, lambda: CudaCapture(device))

    for command in life():
        assert_same(captured.execute(command).to_proto(), eager.execute(command).to_proto())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a CUDA device")
def test_a_decode_step_waits_for_nothing(folder: Path) -> None:
    device = torch.device("cuda", 0)
    _, captured = executors(folder, device, lambda: CudaCapture(device))
    greedy = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)
    first = join(3, random_tokens(9, seed=1), 0)
    first.sampling.CopyFrom(greedy)
    results = [captured.execute(ExecuteRequest(joins=[first], scheduled=scheduled(3, tokens=9)))]

    torch.cuda.set_sync_debug_mode("error")
    try:
        results += [captured.execute(ExecuteRequest(scheduled=scheduled(3))) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert all(len(result.to_proto().sampled) == 1 for result in results)
