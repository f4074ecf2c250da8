"""Weight matrices in ggml's blocks: 32 whole numbers of 4 or 8 bits, one scale, and for Q4_1 an offset."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

GROUP: Final = 32


class BlockFormat(NamedTuple):
    """How ggml lays out a block. `code` is ggml's number for the type."""

    code: int
    block_bytes: int


FORMATS: Final = {"Q4_0": BlockFormat(2, 18), "Q4_1": BlockFormat(3, 20), "Q8_0": BlockFormat(8, 34)}


@dataclass(frozen=True, eq=False)
class BlockQuantised:
    """A matrix `[out_features, in_features]`; its output features are independent rows of blocks."""

    format: str
    """A key of `FORMATS`."""
    blocks: Tensor
    """uint8 `[out_features, in_features / 32 * block_bytes]`."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        rows, row_bytes = self.blocks.shape
        return rows, row_bytes // FORMATS[self.format].block_bytes * GROUP

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights: scale times number plus offset in float32, rounded to `dtype`.

        Source: `ggml-common.h` and `dequantize_row_*` of the ggml project.
        """
        rows = self.blocks.view(len(self.blocks), -1, FORMATS[self.format].block_bytes)
        halves = rows[..., :4].contiguous().view(torch.float16).float()
        scale, offset = halves[..., :1], halves[..., 1:]
        match self.format:
            case "Q8_0":
                values = rows[..., 2:].view(torch.int8).float() * scale
            case "Q4_0":
                values = (_nibbles(rows[..., 2:]) - 8) * scale
            case _:
                values = _nibbles(rows[..., 4:]) * scale + offset
        return values.reshape(self.shape).to(dtype)


def _nibbles(packed: Tensor) -> Tensor:
    """A block's bytes hold numbers 0 to 15 in their low halves, and 16 to 31 in their high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()


Matrix = Tensor | BlockQuantised
"""A weight matrix `[out_features, in_features]`."""
