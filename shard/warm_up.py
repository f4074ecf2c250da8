"""Steps that a shard runs before it is ready, so that the first request is as fast as the tenth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final

from pagoda.shard.v1.shard_pb2 import ConfigureRequest, ExecuteRequest, Fork, Join, Scheduled
from pagoda.v1.sampling_pb2 import SamplingParams

_GREEDY: Final = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)
_SAMPLING: Final = (
    _GREEDY,
    SamplingParams(temperature=1, top_p=1, repetition_penalty=1),
    SamplingParams(temperature=1, top_p=0.9, top_k=20, repetition_penalty=1),
    SamplingParams(temperature=1, top_p=0.9, repetition_penalty=1),
    SamplingParams(temperature=1, top_p=1, min_p=0.1, repetition_penalty=1),
    SamplingParams(temperature=0, top_p=1, presence_penalty=1, frequency_penalty=1, repetition_penalty=1.1),
    SamplingParams(temperature=0, top_p=1, repetition_penalty=1, logit_bias={0: 1}),
    SamplingParams(temperature=0, top_p=1, repetition_penalty=1, logprobs=5),
)
"""One for each way through the sampler."""
_SMALLEST_PREFILL: Final = 16


def commands(request: ConfigureRequest, on_gpu: bool) -> list[ExecuteRequest]:
    """Commands for empty slots: all slots are to be emptied after each. Prompts are of token 0.

    A GPU's libraries have other kernels for other sizes, and load each with its first use.
    """
    shapes = _Shapes(request)
    largest = min(request.max_num_batched_tokens, shapes.longest)
    sizes = [largest]
    while on_gpu and sizes[-1] // 2 >= _SMALLEST_PREFILL:
        sizes.append(sizes[-1] // 2)
    steps = [shapes.step([size], [_GREEDY]) for size in sizes]

    # Several chunks at once, and one beside a decode.
    steps += [shapes.step(lengths, [_GREEDY]) for lengths in ([2, 2], [2] * 8, [1, _SMALLEST_PREFILL])]

    steps += [shapes.step([1], [sampling]) for sampling in _SAMPLING]
    steps += [shapes.step([1] * shapes.most, kinds) for kinds in ([_GREEDY], _SAMPLING)]
    steps.append(shapes.fork())
    return steps


@dataclass(frozen=True)
class _Shapes:
    """What fits into the slots and blocks of a configuration."""

    request: ConfigureRequest

    @property
    def longest(self) -> int:
        """Tokens of one sequence. It samples one more, which needs no block."""
        return max(1, min(self.request.num_blocks * self.request.block_size, self.request.max_model_len - 1))

    @property
    def most(self) -> int:
        """Sequences, with a block each."""
        return min(self.request.max_num_seqs, self.request.num_blocks)

    def step(self, lengths: Sequence[int], sampling: Sequence[SamplingParams]) -> ExecuteRequest:
        """Computes whole prompts of these lengths, or as many of them as fit."""
        joins = [*self._joins(lengths, sampling)]
        return ExecuteRequest(
            joins=joins,
            scheduled=[Scheduled(slot=join.slot, num_tokens=len(join.token_ids)) for join in joins],
        )

    def fork(self) -> ExecuteRequest:
        """A prompt with two outputs, if there are two slots."""
        command = self.step([1], [_GREEDY])
        if self.most > 1:
            target = Join(slot=1, prompt_length=1, computed_length=1, block_ids=[1], sampling=_GREEDY)
            command.forks.append(Fork(source_slot=0, targets=[target]))
        return command

    def _joins(self, lengths: Sequence[int], sampling: Sequence[SamplingParams]) -> Iterator[Join]:
        block = 0
        params = islice(cycle(sampling), self.request.max_num_seqs)
        for slot, (length, kind) in enumerate(zip(lengths, params, strict=False)):
            first, block = block, block - (-length // self.request.block_size)
            if block > self.request.num_blocks or length > self.longest:
                return
            blocks = range(first, block)
            yield Join(
                slot=slot, token_ids=[0] * length, prompt_length=length, block_ids=blocks, sampling=kind
            )
