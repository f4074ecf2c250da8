"""Executes step commands: slots, deltas, one forward pass, sampling."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels import AttentionBatch, KVCache
from pagoda.shard.v1.shard_pb2 import (
    BlockCopy,
    ConfigureRequest,
    ExecuteRequest,
    Fork,
    Join,
    Scheduled,
)
from pagoda.v1 import sampling_pb2
from shard import kv_cache
from shard.models import DecoderModel
from shard.results import StepResult
from shard.rope import rotary_tables
from shard.sampler import SampleResult, SamplingBatch, SamplingParams, sample


class StepError(ValueError):
    """A command does not fit what the slots hold: scheduler and shard disagree, and the epoch must end."""


@dataclass
class Slot:
    """What the host knows of the sequence in a slot; tokens and blocks lie on the device.

    `length` counts tokens including the last sampled one, `computed` those whose K and V are written.
    """

    sampling: SamplingParams
    output_index: int
    num_candidates: int
    prompt_length: int
    length: int
    computed: int
    num_blocks: int = 0


class StepExecutor:
    """Slots and KV tensor of one shard. Not thread-safe: commands run strictly in order."""

    def __init__(self, model: DecoderModel, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self._dtype = dtype
        self._device = device
        self._caches: list[KVCache] = []
        self._host_caches: list[KVCache] = []
        # Device blocks, host blocks, tokens in a block.
        self._shape = (0, 0, 0)
        self._slots: dict[int, Slot] = {}

    def configure(self, request: ConfigureRequest) -> bool:
        """Empties the slots and allocates, unless the blocks at hand fit; True if they were kept."""
        shape = (request.num_blocks, request.num_host_blocks, request.block_size)
        kept = self._shape == shape
        if not kept:
            self._caches, self._host_caches, self._shape = [], [], (0, 0, 0)
            self._caches = kv_cache.allocate(
                self.model.config, request.num_blocks, request.block_size, self._dtype, self._device
            )
            self._host_caches = kv_cache.allocate(
                self.model.config,
                request.num_host_blocks,
                request.block_size,
                self._dtype,
                torch.device("cpu"),
                pinned=self._device.type == "cuda",
            )
            self._shape = shape
        # Dynamic RoPE scales by the served length, so that K never depends on how long a sequence became.
        self.model.cos, self.model.sin = rotary_tables(self.model.config, request.max_model_len, self._device)
        self._max_model_len = request.max_model_len
        max_blocks = -(-request.max_model_len // request.block_size)
        seqs, device = request.max_num_seqs, self._device
        self._token_ids = torch.zeros(seqs, request.max_model_len, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(seqs, max_blocks, dtype=torch.int32, device=device)
        self._slots = {}
        self._warm_up(request)
        return kept

    def _warm_up(self, request: ConfigureRequest) -> None:
        """The largest prefill, then the largest decode; nothing of it stays."""
        params = sampling_pb2.SamplingParams(temperature=1, top_p=0.9, top_k=20, repetition_penalty=1)
        room = min(request.num_blocks * request.block_size, request.max_model_len - 1)
        tokens = min(request.max_num_batched_tokens, room)
        blocks = range(-(-tokens // request.block_size))
        join = Join(slot=0, token_ids=[0] * tokens, prompt_length=tokens, block_ids=blocks, sampling=params)
        prefill = ExecuteRequest(joins=[join], scheduled=[Scheduled(slot=0, num_tokens=tokens)])
        slots = range(min(request.max_num_seqs, request.num_blocks))
        decode = ExecuteRequest(
            leaves=[0],
            joins=[
                Join(slot=slot, token_ids=[0], prompt_length=1, block_ids=[slot], sampling=params)
                for slot in slots
            ],
            scheduled=[Scheduled(slot=slot, num_tokens=1) for slot in slots],
        )
        for command in (prefill, decode):
            self.execute(command).to_proto()
        self._slots = {}

    @torch.inference_mode()
    def execute(self, command: ExecuteRequest) -> StepResult:
        """Runs one command. On a GPU the result may still be on its way.

        Raises:
            StepError: the command contradicts the slots.
        """
        self._apply(command)
        started = time.perf_counter()
        result = StepResult(command.epoch, command.step)
        rows: list[int] = []
        query_lens: list[int] = []
        seq_lens: list[int] = []
        for scheduled in command.scheduled:
            slot = self._advance(scheduled)
            result.num_tokens += scheduled.num_tokens
            query_lens.append(scheduled.num_tokens)
            seq_lens.append(slot.computed)
            if slot.computed == slot.length:
                rows.append(result.num_tokens - 1)
                result.slots.append(scheduled.slot)
        if not {fork.source_slot for fork in command.forks} <= set(result.slots):
            raise StepError("a slot is to be forked that does not sample in this step")
        if not query_lens:
            return result
        hidden = self._forward([s.slot for s in command.scheduled], query_lens, seq_lens)
        logits = self.model.compute_logits(hidden[rows]) if rows else None
        computed = time.perf_counter()
        if logits is not None:
            logits = self._fork(command.forks, logits, result)
            result.samples = self._sample(logits, result.slots)
            result.num_candidates = [self._slots[slot].num_candidates for slot in result.slots]
        result.compute_seconds = computed - started
        result.sample_seconds = time.perf_counter() - computed
        return result

    def _fork(self, forks: Sequence[Fork], logits: Tensor, result: StepResult) -> Tensor:
        """Copies slots that are about to sample; returns the logits with a row for each copy."""
        if not forks:
            return logits
        rows = list(range(len(result.slots)))
        for fork in forks:
            row = result.slots.index(fork.source_slot)
            length = self._slot(fork.source_slot).length
            for target in fork.targets:
                self._check_free(target.slot)
                self._token_ids[target.slot, :length] = self._token_ids[fork.source_slot, :length]
                self._take_slot(target, length)
                rows.append(row)
                result.slots.append(target.slot)
        return logits[rows]

    def _advance(self, scheduled: Scheduled) -> Slot:
        slot = self._slot(scheduled.slot)
        slot.computed += scheduled.num_tokens
        room = min(slot.length, slot.num_blocks * self._shape[2])
        full = slot.computed == slot.length == self._max_model_len
        if not scheduled.num_tokens or slot.computed > room or full:
            raise StepError(f"slot {scheduled.slot} can't compute {scheduled.num_tokens} tokens: {slot}")
        return slot

    def _forward(self, slots: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]) -> Tensor:
        block_size = self._shape[2]
        on_device = torch.tensor(slots, device=self._device)
        used_blocks = -(-max(seq_lens) // block_size)
        tables = self._block_tables[on_device, :used_blocks]
        batch = AttentionBatch.build(tables, query_lens, seq_lens, block_size)
        token_ids = self._token_ids[on_device[batch.owners], batch.positions].long()
        return self.model.forward(token_ids, batch, self._caches)

    def _sample(self, logits: Tensor, slots: Sequence[int]) -> SampleResult:
        held = [self._slots[slot] for slot in slots]
        lengths = [slot.length for slot in held]
        batch = SamplingBatch.build(
            [slot.sampling for slot in held],
            [slot.output_index for slot in held],
            lengths,
            [self._token_ids[index, : slot.length] for index, slot in zip(slots, held, strict=True)],
            [slot.prompt_length for slot in held],
            self._device,
        )
        result = sample(logits, batch)
        where = torch.tensor([*zip(slots, lengths, strict=True)], device=self._device).T
        self._token_ids[where[0], where[1]] = result.token_ids.int()
        for slot in held:
            slot.length += 1
        return result

    def _apply(self, command: ExecuteRequest) -> None:
        """The deltas, in the order of the contract."""
        for index in command.leaves:
            self._slot(index)
            del self._slots[index]
        for join in command.joins:
            self._join(join)
        for update in command.block_updates:
            self._update_blocks(update.slot, update.start, update.block_ids)
        for override in command.next_tokens:
            slot = self._slot(override.slot)
            self._token_ids[override.slot, slot.length - 1] = override.token_id
        self._move(self._caches, self._host_caches, command.swap_outs)
        self._move(self._caches, self._caches, command.copies)
        self._move(self._host_caches, self._caches, command.swap_ins)

    def _move(self, sources: list[KVCache], destinations: list[KVCache], moves: Sequence[BlockCopy]) -> None:
        if moves:
            kernels.copy_blocks(
                sources, destinations, [m.source for m in moves], [m.destination for m in moves]
            )

    def _join(self, join: Join) -> None:
        length = len(join.token_ids)
        self._check_free(join.slot)
        if not join.computed_length < length <= self._max_model_len:
            raise StepError(f"slot {join.slot}: {length} tokens, {join.computed_length} of them computed")
        self._token_ids[join.slot, :length] = torch.tensor(join.token_ids, dtype=torch.int32)
        self._take_slot(join, length)

    def _check_free(self, index: int) -> None:
        if index in self._slots or index >= len(self._token_ids):
            raise StepError(f"slot {index} is taken or not below {len(self._token_ids)}")

    def _take_slot(self, join: Join, length: int) -> None:
        params = join.sampling
        logprobs = params.logprobs if params.HasField("logprobs") else None
        if join.num_candidates:
            logprobs = join.num_candidates
        self._slots[join.slot] = Slot(
            sampling=SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
                seed=params.seed,
                logprobs=logprobs,
            ),
            output_index=join.output_index,
            num_candidates=join.num_candidates,
            prompt_length=join.prompt_length,
            length=length,
            computed=join.computed_length,
        )
        self._update_blocks(join.slot, 0, join.block_ids)

    def _update_blocks(self, index: int, start: int, block_ids: Sequence[int]) -> None:
        slot = self._slot(index)
        end = start + len(block_ids)
        in_pool = max(block_ids, default=0) < self._shape[0]
        if start > slot.num_blocks or end > self._block_tables.shape[1] or not in_pool:
            raise StepError(f"slot {index}: blocks {list(block_ids)} from {start} on don't fit {slot}")
        self._block_tables[index, start:end] = torch.tensor(block_ids, dtype=torch.int32)
        slot.num_blocks = end

    def _slot(self, index: int) -> Slot:
        try:
            return self._slots[index]
        except KeyError:
            raise StepError(f"slot {index} is empty") from None
