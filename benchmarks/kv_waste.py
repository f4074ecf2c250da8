"""How much of the allocated KV memory holds no token: the real scheduler with a full pool, without a model.

All requests are there from the start, so the pool is full until the last of them run. Waste is
1 - filled / allocated token slots, both summed over steps. `floor_ratio` is the same sum without a scheduler:
every sequence has, in every step that it runs, exactly the blocks that its tokens need.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Final

from benchmarks.command import BareParser, failing_in_one_line, positive_int
from benchmarks.cost_model import CostModel
from benchmarks.paged import PagedServer
from benchmarks.traces import ALPACA_LIKE, SHAREGPT_LIKE, Lengths, Trace, at_once, chat
from scheduler.limits import Limits

WORKLOADS: Final = {"sharegpt-like": SHAREGPT_LIKE, "alpaca-like": ALPACA_LIKE}


def floor_ratio(trace: Trace, block_size: int) -> float:
    """Waste of block-wise allocation itself, for sequences that each run alone, without a pause."""
    allocated = filled = 0
    for request in trace:
        # The step that samples the first token holds the prompt; the last token is never computed.
        for tokens in range(request.prompt_length, request.prompt_length + request.output_length):
            allocated += -(-tokens // block_size) * block_size
            filled += tokens
    return 1 - filled / allocated


def measure(name: str, lengths: tuple[Lengths, Lengths], options: argparse.Namespace) -> dict[str, object]:
    """One trace's line."""
    trace = chat(options.requests, at_once(), lengths, options.seed)
    longest = lengths[0].longest + lengths[1].longest
    limits = Limits(
        options.num_blocks,
        options.block_size,
        options.max_num_seqs,
        options.max_num_seqs + 1024,
        longest,
        vocab_size=1 << 31,
        prefix_caching=False,
    )
    server = PagedServer(limits, CostModel(), steps_per_waste_sample=1)
    measured = server.run(trace)
    floor = floor_ratio(trace, options.block_size)
    return {
        "trace": name,
        "waste_ratio": round(measured.waste_ratio, 4),
        "floor_ratio": round(floor, 4),
        "over_floor": round(measured.waste_ratio / floor, 3),
        "mean_used_ratio": round(
            measured.allocated_slots / (measured.steps * limits.num_blocks * limits.block_size), 3
        ),
        "mean_running": round(measured.sequence_steps / measured.steps, 1),
        "preemptions": server.totals.preemptions,
        "requests": len(measured.finishes),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON line per trace."""
    parser = BareParser("kv_waste", __doc__)
    parser.add_argument("--requests", type=positive_int, default=8000, help="of each trace")
    parser.add_argument("--num-blocks", type=positive_int, default=981, help="device blocks")
    parser.add_argument("--block-size", type=positive_int, default=16, help="tokens")
    parser.add_argument("--max-num-seqs", type=positive_int, default=512, help="sequences")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    options = parser.parse_args(arguments)
    with failing_in_one_line(parser.prog):
        for name, lengths in WORKLOADS.items():
            print(json.dumps(measure(name, lengths, options)), flush=True)


if __name__ == "__main__":
    main()
