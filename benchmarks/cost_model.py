"""How long a step takes on the hardware that is simulated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: fixed + per token computed + per token of K and V read + per token swapped.

    The defaults are roughly those of the PagedAttention paper's first set-up, OPT-13B in 16 bits on one A100
    of 40 GB:

    - fixed: 26 GB of weights at about 1.5 TB/s, and a few ms of overhead;
    - per token: 2 x 13e9 FLOP at 60 % of 312 TFLOP/s;
    - per token of K and V: 800 KB (section 3) at 1.5 TB/s;
    - per token swapped: 800 KB at 25 GB/s, PCIe 4.
    """

    fixed_s: float = 0.020
    per_token_s: float = 0.00014
    per_kv_token_s: float = 0.00000053
    per_swapped_token_s: float = 0.000032

    def step_s(self, tokens: int, kv_tokens: int, swapped_tokens: int = 0) -> float:
        """Seconds of a step that computes `tokens`, and whose attention reads `kv_tokens`."""
        return (
            self.fixed_s
            + self.per_token_s * tokens
            + self.per_kv_token_s * kv_tokens
            + self.per_swapped_token_s * swapped_tokens
        )
