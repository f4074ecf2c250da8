"""Executes step commands: deltas to the device, one forward pass, sampling."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

import kernels
from kernels import AttentionBatch, KVCache
from pagoda.shard.v1.shard_pb2 import BlockCopy, ConfigureRequest, ExecuteRequest
from shard import decode_graphs, kv_cache, metrics, warm_up
from shard.constraints import Grammars, mask_logits
from shard.decode_graphs import Capture, DecodeGraphs
from shard.models import DecoderModel
from shard.parallel import RankGroup
from shard.prompt_logprobs import PromptLogprobs
from shard.results import StepResult, Stopwatch
from shard.rope import rotary_tables
from shard.sampler import SampleResult, SamplingBatch, sample
from shard.slots import Slots, Step, StepError
from shard.upload import Upload

__all__ = ["StepError", "StepExecutor"]

log = logging.getLogger(__name__)
# Of rows without penalties nobody reads the tokens.
_UNREAD: Final = torch.empty(0, dtype=torch.int32)


class StepExecutor:
    """Slots and KV tensor of one shard. Not thread-safe: commands run strictly in order, on one thread."""

    def __init__(
        self,
        model: DecoderModel,
        dtype: torch.dtype,
        device: torch.device,
        start_capture: Callable[[], Capture] | None = None,
        ranks: RankGroup | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`start_capture` gives each configuration what captures its decode steps, else they run eagerly.

        `device` names a GPU by its index. Of several `ranks`, all execute the same commands, and 0 samples:
        it alone has `grammars`, of this model's vocabulary, for sequences with a constraint.
        """
        self._ranks = ranks
        self.model = model
        self._dtype = dtype
        self._device = device
        self._start_capture = start_capture
        self._match = grammars.match if grammars else None
        self._caches: list[KVCache] = []
        self._host_caches: list[KVCache] = []
        # Device blocks, host blocks, tokens in a block; then sequences, tokens of a step, and of a sequence.
        self._pool_shape = (0, 0, 0)
        self._step_shape = (0, 0, 0)
        self._slots = Slots(0, 0, 0, 1, device)
        self._upload = Upload(0, device)
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def configure(self, request: ConfigureRequest) -> bool:
        """Empties the slots and allocates, unless the blocks at hand fit; True if they were kept.

        Warms up as well, unless an equal configuration did, on every rank.

        Raises:
            RankMismatchError: the ranks don't belong together.
        """
        if self._device.type == "cuda":
            # Where Triton launches. The setting is the thread's.
            torch.cuda.set_device(self._device)
        pool_shape = (request.num_blocks, request.num_host_blocks, request.block_size)
        step_shape = (request.max_num_seqs, request.max_num_batched_tokens, request.max_model_len)
        kept = self._pool_shape == pool_shape
        warm = kept and self._step_shape == step_shape
        if self._ranks:
            self._ranks.join(request.rendezvous_address, request.epoch, f"{pool_shape}, {step_shape}")
            warm = not self._ranks.any(not warm)
        if warm:
            self._slots.clear()
            return kept
        # Graphs know the addresses of all that follows.
        self._graphs, self._step_shape = None, (0, 0, 0)
        if not kept:
            self._caches, self._host_caches, self._pool_shape = [], [], (0, 0, 0)
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
            self._pool_shape = pool_shape
        # Dynamic RoPE scales by the served length, so that K never depends on how long a sequence became.
        self.model.cos, self.model.sin = rotary_tables(self.model.config, request.max_model_len, self._device)
        self._slots = Slots(
            request.max_num_seqs,
            request.max_model_len,
            request.num_blocks,
            request.block_size,
            self._device,
            self._match,
        )
        # Slots, lengths, rows and places of a whole batch; tokens that join; some blocks.
        capacity = 16 * request.max_num_seqs + 4 * request.max_num_batched_tokens
        self._upload = Upload(capacity, self._device)
        self._warm_up(request)
        self._step_shape = step_shape
        return kept

    def _warm_up(self, request: ConfigureRequest) -> None:
        """Captures, and runs a step of every kind; nothing of them stays."""
        commands = warm_up.commands(request, self._device.type == "cuda")
        most = min(request.max_num_seqs, request.num_blocks)
        sizes = decode_graphs.batch_sizes(most) if self._start_capture else []
        done, total = 0, len(sizes) + len(commands)
        started = time.perf_counter()

        def progress() -> None:
            nonlocal done
            done += 1
            metrics.WARM_UP_RATIO.set(done / total)
            if done * 10 // total > (done - 1) * 10 // total:
                log.info("warm-up: %d of %d steps, %.1f s", done, total, time.perf_counter() - started)

        if self._start_capture:
            self._graphs = DecodeGraphs(
                self._decode,
                self._upload.buffer,
                sizes,
                self.model.config.vocab_size,
                self._start_capture(),
                progress,
            )
        for command in commands:
            self.execute(command).to_proto()
            self._slots.clear()
            progress()

    @torch.inference_mode()
    def execute(self, command: ExecuteRequest) -> StepResult:
        """Runs one command. On a GPU the result may still be on its way: nothing here waits for the device.

        Raises:
            StepError: the command contradicts the slots.
        """
        slots = self._slots
        slots.apply(command)
        step = slots.advance(command.scheduled, command.forks)
        watch = Stopwatch(self._device)
        result = StepResult(command.epoch, command.step, watch, step.num_tokens)
        graphs = self._graphs if step.pad(self._padded_size(step)) else None

        sent = self._send(step)
        _scatter(slots.token_ids, sent.joined_indices, sent.joined)
        _scatter(slots.token_ids, sent.override_indices, sent.overrides)
        _scatter(slots.block_tables, sent.block_indices, sent.block_ids)
        self._move(self._caches, self._host_caches, command.swap_outs)
        self._move(self._caches, self._caches, command.copies)
        self._move(self._host_caches, self._caches, command.swap_ins)
        if not step.slots:
            return result
        watch.mark()
        logits = self._replay(graphs, step, sent) if graphs else self._forward(step, sent, result)
        watch.mark()
        if step.rows:
            if step.fork_rows:
                logits = logits.index_select(0, sent.fork_rows)
                tokens = slots.token_ids[:, : max(step.next_positions)]
                tokens.index_copy_(0, sent.fork_targets, tokens.index_select(0, sent.fork_sources))
            _scatter(slots.token_ids, sent.next_indices, self._next_tokens(logits, step, result))
        watch.mark()
        return result

    def _padded_size(self, step: Step) -> int | None:
        # A chunk of one token looks like a decode, but its hidden states may be wanted too.
        decodes_only = step.num_tokens == len(step.slots) > 0 and not step.prompt_chunks
        return self._graphs.padded_size(len(step.slots)) if self._graphs and decodes_only else None

    def _send(self, step: Step) -> "_Sent":
        width = self._slots.token_ids.shape[1]
        places = zip(step.sampling_slots, step.next_positions, strict=True)
        sections = (
            # First, as graphs have it.
            step.slots,
            step.seq_lens,
            # All of them in their order need no selection.
            step.rows if len(step.rows) < step.num_tokens else (),
            step.fork_rows,
            step.fork_sources,
            step.fork_targets,
            [slot * width + position for slot, position in places],
            *self._slots.take_deltas(),
        )
        return _Sent(*self._upload.send(*sections))

    def _replay(self, graphs: DecodeGraphs, step: Step, sent: "_Sent") -> Tensor:
        """Logits of `step.rows`."""
        logits = graphs.replay(step.seq_lens)[: step.num_tokens]
        return logits.index_select(0, sent.rows) if sent.rows.numel() else logits

    def _forward(self, step: Step, sent: "_Sent", result: StepResult) -> Tensor:
        """Logits of `step.rows`. Log-probabilities of prompts go to `result`."""
        block_size = self._pool_shape[2]
        tables = self._slots.block_tables[:, : -(-max(step.seq_lens) // block_size)]
        tables = tables.index_select(0, sent.slots)
        if step.num_tokens == len(step.slots):
            batch = AttentionBatch.of_decodes(tables, sent.seq_lens, block_size, step.seq_lens)
            owners = sent.slots
        else:
            batch = AttentionBatch.build(tables, step.query_lens, step.seq_lens, block_size)
            owners = sent.slots.index_select(0, batch.owners)
        hidden = self._run(owners, batch)
        if step.prompt_chunks:
            result.prompt_logprobs = PromptLogprobs(
                step.prompt_chunks, self._slots.token_ids, hidden, self.model.compute_logits
            )
        if sent.rows.numel():
            hidden = hidden.index_select(0, sent.rows)
        return self.model.compute_logits(hidden) if step.rows else hidden

    def _decode(self, slots: Tensor, seq_lens: Tensor, host_seq_lens: Sequence[int]) -> Tensor:
        """See `decode_graphs.Decode`."""
        tables = self._slots.block_tables.index_select(0, slots)
        batch = AttentionBatch.of_decodes(tables, seq_lens, self._pool_shape[2], host_seq_lens)
        return self.model.compute_logits(self._run(slots, batch))

    def _run(self, slots: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states of the tokens of `batch`, of which `slots` [num_tokens] has each one's slot."""
        held = self._slots.token_ids
        token_ids = held.view(-1).index_select(0, batch.positions.add(slots, alpha=held.shape[1])).long()
        return self.model.forward(token_ids, batch, self._caches)

    def _next_tokens(self, logits: Tensor, step: Step, result: StepResult) -> Tensor:
        """Of `step.sampling_slots`, int64, the same on all ranks."""
        if self._ranks is None or not self._ranks.rank:
            result.slots, result.samples = step.sampling_slots, self._sample(logits, step)
            result.num_candidates = [self._slots[slot].num_candidates for slot in step.sampling_slots]
            token_ids = result.samples.token_ids
        else:
            token_ids = torch.empty(len(step.sampling_slots), dtype=torch.int64, device=self._device)
        if self._ranks:
            self._ranks.broadcast(token_ids)
        return token_ids

    def _sample(self, logits: Tensor, step: Step) -> SampleResult:
        slots, tokens = [self._slots[index] for index in step.sampling_slots], self._slots.token_ids
        batch = SamplingBatch.build(
            [slot.sampling for slot in slots],
            [slot.output_index for slot in slots],
            step.next_positions,
            [
                tokens[index, :position] if slot.sampling.penalised else _UNREAD
                for index, position, slot in zip(step.sampling_slots, step.next_positions, slots, strict=True)
            ],
            [slot.prompt_length for slot in slots],
            [slot.bias_at(position) for slot, position in zip(slots, step.next_positions, strict=True)],
            self._device,
        )
        matchers = [slot.matcher for slot in slots]
        if not any(matchers):
            return sample(logits, batch)
        samples = sample(logits, batch, lambda logits: mask_logits(logits, matchers))
        for row, matcher in enumerate(matchers):
            if matcher:
                matcher.sampled(samples, row)
        return samples

    def _move(self, sources: list[KVCache], destinations: list[KVCache], moves: Sequence[BlockCopy]) -> None:
        if moves:
            kernels.copy_blocks(
                sources, destinations, [m.source for m in moves], [m.destination for m in moves]
            )


class _Sent(NamedTuple):
    """A step's numbers on the device, int64. `Step` says what those are that have its names."""

    slots: Tensor
    seq_lens: Tensor
    rows: Tensor
    """Empty if all tokens sample."""
    fork_rows: Tensor
    fork_sources: Tensor
    fork_targets: Tensor
    next_indices: Tensor
    """Where in the token ids the sampled ones go, by flat index."""
    joined_indices: Tensor
    joined: Tensor
    override_indices: Tensor
    overrides: Tensor
    block_indices: Tensor
    block_ids: Tensor


def _scatter(table: Tensor, indices: Tensor, numbers: Tensor) -> None:
    if indices.numel():
        table.view(-1).index_copy_(0, indices, numbers.to(table.dtype))
