"""A mixture of experts: the weights of a layer's many MLPs, of which each token takes a few."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Experts:
    """In the place of a layer's MLP, or beside it. Of several ranks, each has some of the experts.

    A token's scores are the softmax of `gate @ x` over all experts; the highest `num_per_token` of them are
    its shares, as they are or, with `normalise`, divided by their sum. The layer adds, by share, what those
    experts make of the token: each is a gated MLP.
    """

    gate: Tensor
    """`[num_experts, hidden_size]`."""
    gate_up: Tensor
    """`[num_held, 2 * expert_size, hidden_size]`, gates over ups."""
    down: Tensor
    """`[num_held, hidden_size, expert_size]`."""
    first: int
    """Which expert the first of those held is."""
    num_per_token: int
    normalise: bool
    shared_gate: Tensor | None = None
    """`[1, hidden_size]`: what the layer's own MLP makes of x counts by the sigmoid of `shared_gate @ x`."""
