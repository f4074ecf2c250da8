"""The C++ decoder layers, for each instruction set that this CPU has, against `ComposedDecoder`."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, DecoderShape, Experts, KVCache, LayerWeights
from kernels.block_quantised import FORMATS, GROUP, BlockQuantised
from kernels.cpu import library
from kernels.cpu.build import supported_sets
from kernels.cpu.decoder import PackedDecoder, PackedLinear
from kernels.decoder import ComposedDecoder, PlainLinear

# A few roundings of float32; nothing beside those of bfloat16.
SLACK = 1e-6
SETS = supported_sets(library.cpu_flags())
EXPERTS = pytest.mark.parametrize("experts", [0, 5])
SMALL = DecoderShape(
    hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=16, inner_sizes=frozenset({70}), rms_norm_eps=1e-5
)


@dataclass(frozen=True)
class Case:
    """A stack of layers and a step: per sequence, tokens in this step and tokens once it is done."""

    shape: DecoderShape
    queries: Sequence[int]
    lengths: Sequence[int]
    block_size: int = 16
    biases: bool = False
    qk_norm: bool = False
    windows: Sequence[int | None] = field(default=(None, None))
    experts: int = 0
    """How many of the first `held` there are; each token takes two."""
    held: range = range(0)
    shared: bool = False
    """Whether there is an MLP beside the experts."""


CASES = {
    "one token": Case(SMALL, [1], [1]),
    "decodes at block borders": Case(SMALL, [1, 1, 1, 1], [15, 16, 17, 33]),
    "more rows than a tile": Case(SMALL, [1] * 13, range(1, 14)),
    "more rows than a row block": Case(SMALL, [101], [101]),
    "chunk that starts inside a block": Case(SMALL, [40], [75]),
    "mixed": Case(SMALL, [1, 30, 1, 5], [70, 30, 3, 25]),
    "several spans, decodes": Case(SMALL, [1, 1], [513, 256]),
    "several spans, chunk": Case(SMALL, [60], [560]),
    "several spans, few rows": Case(SMALL, [5], [600]),
    "blocks of one token": Case(SMALL, [3, 1], [9, 70], block_size=1),
    "blocks larger than a tile": Case(SMALL, [3, 1], [90, 200], block_size=128),
    "biases": Case(SMALL, [4, 1], [4, 20], biases=True),
    "query and key norms": Case(SMALL, [4, 1], [4, 20], qk_norm=True),
    "sliding windows": Case(SMALL, [90, 1, 1], [400, 300, 4], windows=(9, 100)),
    "window on one layer": Case(SMALL, [70, 1], [90, 90], windows=(None, 64)),
    "multi-head": Case(replace(SMALL, num_kv_heads=6), [7, 1], [7, 66]),
    "multi-query": Case(replace(SMALL, num_kv_heads=1), [7, 1], [7, 66]),
    "head of 64": Case(replace(SMALL, num_heads=3, num_kv_heads=1, head_dim=64), [7, 1], [7, 66]),
    "head of 80": Case(replace(SMALL, num_heads=2, head_dim=80), [7, 1], [7, 66]),
    "head of 6": Case(replace(SMALL, head_dim=6), [7, 1], [7, 66]),
    "head of 256": Case(replace(SMALL, num_heads=2, head_dim=256), [50, 1], [50, 300]),
    "odd widths": Case(replace(SMALL, hidden_size=38, inner_sizes=frozenset({34})), [7, 1], [7, 66]),
    "experts": Case(SMALL, [30, 1, 1], [33, 9, 12], experts=5, held=range(5)),
    "experts, one token": Case(SMALL, [1], [9], experts=5, held=range(5)),
    "some of the experts": Case(SMALL, [30, 1, 1], [33, 9, 12], experts=5, held=range(2, 4)),
    "experts beside an MLP": Case(
        SMALL, [30, 1, 1], [33, 9, 12], experts=5, held=range(5), shared=True, biases=True
    ),
    "depth over a block": Case(replace(SMALL, inner_sizes=frozenset({4100})), [14, 1], [14, 3]),
}


def make_layers(case: Case, dtype: torch.dtype, generator: torch.Generator) -> list[LayerWeights]:
    shape = case.shape
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        values: Tensor = torch.randn(rows, columns, generator=generator) / columns**0.5
        return values.to(dtype)

    def norm(size: int) -> Tensor:
        values: Tensor = 1 + torch.randn(size, generator=generator) / 4
        return values.to(dtype)

    def vector(size: int, wanted: bool) -> Tensor | None:
        return norm(size) if wanted else None

    (inner,) = shape.inner_sizes
    mlp = not case.experts or case.shared

    def experts() -> Experts:
        # As others have it: not of the size of the MLP.
        size, held = inner // 4 * 2, range(case.held.start, case.held.stop)
        return Experts(
            gate=matrix(case.experts, shape.hidden_size) * 4,
            gate_up=torch.stack([matrix(2 * size, shape.hidden_size) for _ in held]),
            down=torch.stack([matrix(shape.hidden_size, size) for _ in held]),
            first=held.start,
            num_per_token=2,
            normalise=not case.shared,
            shared_gate=matrix(1, shape.hidden_size) if case.shared else None,
        )

    return [
        LayerWeights(
            attention_norm=norm(shape.hidden_size),
            qkv=matrix(heads + 2 * kv_heads, shape.hidden_size),
            qkv_bias=vector(heads + 2 * kv_heads, case.biases),
            query_norm=vector(shape.head_dim, case.qk_norm),
            key_norm=vector(shape.head_dim, case.qk_norm),
            output=matrix(shape.hidden_size, heads),
            output_bias=vector(shape.hidden_size, case.biases),
            mlp_norm=norm(shape.hidden_size),
            gate_up=matrix(2 * inner, shape.hidden_size) if mlp else None,
            gate_up_bias=vector(2 * inner, case.biases and mlp),
            down=matrix(shape.hidden_size, inner) if mlp else None,
            down_bias=vector(shape.hidden_size, case.biases and mlp),
            sliding_window=window,
            experts=experts() if case.experts else None,
        )
        for window in case.windows
    ]


def widened(layer: LayerWeights) -> LayerWeights:
    experts = None if layer.experts is None else replace(layer.experts, **_doubles(layer.experts))
    return replace(layer, **{**_doubles(layer), "experts": experts})


def _doubles(weights: LayerWeights | Experts) -> dict[str, Any]:
    return {name: value.double() for name, value in vars(weights).items() if isinstance(value, Tensor)}


@dataclass
class Inputs:
    """What a step reads; caches hold the earlier tokens, and NaN wherever no token may look."""

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    batch: AttentionBatch
    caches: list[KVCache]

    @classmethod
    def build(cls, case: Case, dtype: torch.dtype, generator: torch.Generator) -> "Inputs":
        shape, size = case.shape, case.block_size
        needed = [-(-length // size) for length in case.lengths]
        order = torch.randperm(sum(needed) + 3, generator=generator)
        tables = torch.full((len(needed), max(needed) + 1), -1, dtype=torch.int32)
        for row, (count, end) in enumerate(zip(needed, torch.tensor(needed).cumsum(0), strict=True)):
            tables[row, :count] = order[end - count : end]
        batch = AttentionBatch.build(tables, list(case.queries), list(case.lengths), size)
        caches = []
        for _ in case.windows:
            layer = []
            for _ in range(2):
                cache = torch.full((len(order), size, shape.num_kv_heads, shape.head_dim), torch.nan)
                for row, (count, length) in enumerate(zip(case.queries, case.lengths, strict=True)):
                    past = torch.arange(length - count)
                    values = torch.randn(len(past), shape.num_kv_heads, shape.head_dim, generator=generator)
                    cache[tables[row].long()[past // size], past % size] = values
                layer.append(cache.to(dtype))
            caches.append((layer[0], layer[1]))
        tokens = sum(case.queries)
        angles = torch.rand(tokens, shape.head_dim // 2, generator=generator) * 6
        hidden = torch.randn(tokens, shape.hidden_size, generator=generator).to(dtype)
        return cls(hidden, angles.cos().to(dtype), angles.sin().to(dtype), batch, caches)

    def copy(self, dtype: torch.dtype) -> "Inputs":
        def clone(tensor: Tensor) -> Tensor:
            return tensor.to(dtype, copy=True)

        caches = [(clone(key), clone(value)) for key, value in self.caches]
        return Inputs(clone(self.hidden), clone(self.cos), clone(self.sin), self.batch, caches)

    def run(self, decoder: ComposedDecoder | PackedDecoder) -> Tensor:
        return decoder.forward(self.hidden, self.cos, self.sin, self.batch, self.caches)


@pytest.fixture(params=SETS)
def native(request: pytest.FixtureRequest) -> ctypes.CDLL:
    loaded = library.load_set(request.param)
    assert loaded, f"{request.param} is not built: run `make kernels` on a machine with g++"
    return loaded


def error(result: Tensor, exact: Tensor) -> float:
    """The root mean square of the difference, over that of the values."""
    return float((result.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_errs_no_more_than_the_composition(native: ctypes.CDLL, case: Case, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    layers = make_layers(case, dtype, generator)
    inputs = Inputs.build(case, dtype, generator)
    wide, plain = inputs.copy(torch.float64), inputs.copy(dtype)

    exact = wide.run(ComposedDecoder(case.shape, [widened(layer) for layer in layers]))
    composed = plain.run(ComposedDecoder(case.shape, layers))
    packed = inputs.run(PackedDecoder(native, case.shape, layers))

    assert error(packed, exact) <= 1.25 * error(composed, exact) + SLACK
    for ours, theirs, true in zip(inputs.caches, plain.caches, wide.caches, strict=True):
        for cache, other, sure in zip(ours, theirs, true, strict=True):
            written = ~sure.isnan()
            assert torch.equal(cache.isnan(), ~written)
            assert error(cache[written], sure[written]) <= 1.25 * error(other[written], sure[written]) + SLACK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EXPERTS
def test_a_sequence_is_the_same_bit_for_bit_in_every_batch(
    native: ctypes.CDLL, dtype: torch.dtype, experts: int
) -> None:
    case = Case(SMALL, [1, 70, 1, 9], [600, 330, 3, 25], experts=experts, held=range(experts))
    generator = torch.Generator().manual_seed(8)
    decoder = PackedDecoder(native, SMALL, make_layers(case, dtype, generator))
    together = Inputs.build(case, dtype, generator)
    alone = together.copy(dtype)
    expected = together.run(decoder)

    start = 0
    for row, (count, length) in enumerate(zip(case.queries, case.lengths, strict=True)):
        rows = slice(start, start + count)
        start += count
        batch = AttentionBatch.build(alone.batch.block_tables[row : row + 1], [count], [length], 16)
        inputs = Inputs(alone.hidden[rows].clone(), alone.cos[rows], alone.sin[rows], batch, alone.caches)
        assert torch.equal(inputs.run(decoder), expected[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EXPERTS
def test_a_prompt_is_the_same_bit_for_bit_in_every_chunking(
    native: ctypes.CDLL, dtype: torch.dtype, experts: int
) -> None:
    whole = Case(SMALL, [300], [300], experts=experts, held=range(experts))
    generator = torch.Generator().manual_seed(9)
    decoder = PackedDecoder(native, SMALL, make_layers(whole, dtype, generator))
    once = Inputs.build(whole, dtype, generator)
    chunked = once.copy(dtype)
    expected = once.run(decoder)

    tables = once.batch.block_tables
    for first, last in ((0, 1), (1, 16), (16, 47), (47, 270), (270, 299), (299, 300)):
        rows = slice(first, last)
        batch = AttentionBatch.build(tables, [last - first], [last], 16)
        inputs = Inputs(
            chunked.hidden[rows].clone(), chunked.cos[rows], chunked.sin[rows], batch, chunked.caches
        )
        assert torch.equal(inputs.run(decoder), expected[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 97, 200])
def test_linear(native: ctypes.CDLL, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(101, 38, generator=generator).to(dtype)
    x = torch.randn(rows, 38, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T

    result = PackedLinear(native, weight, dtype).forward(x)

    assert result.dtype == torch.float32
    assert error(result, exact) <= error(PlainLinear(weight).forward(x), exact) + SLACK


def quantised(format_name: str, size: int, depth: int, generator: torch.Generator) -> BlockQuantised:
    """Random numbers under scales that are neither tiny nor infinite."""
    layout = FORMATS[format_name]
    shape = (size, depth // GROUP, layout.block_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    halves = 2 if format_name == "Q4_1" else 1
    scales = torch.randn(*shape[:2], halves, generator=generator).half() / 16
    blocks[..., : 2 * halves] = scales.view(torch.uint8)
    return BlockQuantised(format_name, blocks.view(size, -1))


@pytest.mark.parametrize("rows", [1, 2, 3, 12, 13, 97])
@pytest.mark.parametrize("format_name", FORMATS)
def test_quantised_blocks_give_the_bits_of_their_dense_weights(
    native: ctypes.CDLL, format_name: str, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = quantised(format_name, 70, 352, generator)
    x = torch.randn(rows, 352, generator=generator).bfloat16()
    dense = weight.dense(torch.bfloat16)

    expected = PackedLinear(native, dense, torch.bfloat16).forward(x)

    assert dense.abs().max() > 0
    assert torch.equal(PackedLinear(native, weight, torch.bfloat16).forward(x), expected)


def test_layers_with_quantised_matrices_give_the_bits_of_dense_ones(native: ctypes.CDLL) -> None:
    shape = replace(SMALL, hidden_size=64, inner_sizes=frozenset({96}))
    case = Case(shape, [20, 1], [20, 33])
    generator = torch.Generator().manual_seed(3)
    plain, *_ = make_layers(case, torch.bfloat16, generator)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    matrices: dict[str, Any] = {
        "qkv": quantised("Q4_0", heads, 64, generator),
        "output": quantised("Q8_0", 64, shape.num_heads * shape.head_dim, generator),
        "gate_up": quantised("Q4_1", 192, 64, generator),
        "down": quantised("Q4_1", 64, 96, generator),
    }
    dense: dict[str, Any] = {name: matrix.dense(torch.bfloat16) for name, matrix in matrices.items()}
    first = Inputs.build(replace(case, windows=(None,)), torch.bfloat16, generator)
    second = first.copy(torch.bfloat16)

    expected = first.run(PackedDecoder(native, shape, [replace(plain, **dense)]))

    assert torch.equal(second.run(PackedDecoder(native, shape, [replace(plain, **matrices)])), expected)


@pytest.mark.parametrize("what", ["hidden", "key", "value"])
@EXPERTS
def test_what_is_not_a_number_stays_so(native: ctypes.CDLL, what: str, experts: int) -> None:
    """Or the logits would look sound."""
    case = Case(SMALL, [1], [40], windows=(None,), experts=experts, held=range(experts))
    generator = torch.Generator().manual_seed(2)
    decoder = PackedDecoder(native, SMALL, make_layers(case, torch.float32, generator))
    inputs = Inputs.build(case, torch.float32, generator)
    block = inputs.batch.block_tables[0, 1]
    spoilt = {
        "hidden": inputs.hidden,
        "key": inputs.caches[0][0][block, 3],
        "value": inputs.caches[0][1][block, 3],
    }
    spoilt[what][0, 0] = torch.nan

    assert inputs.run(decoder).isnan().any()


def test_caches_are_not_kept_from_being_freed(native: ctypes.CDLL) -> None:
    case = Case(SMALL, [1], [1])
    generator = torch.Generator().manual_seed(2)
    decoder = PackedDecoder(native, SMALL, make_layers(case, torch.float32, generator))
    inputs = Inputs.build(case, torch.float32, generator)
    other = inputs.copy(torch.float32)
    expected = inputs.run(decoder)
    held = weakref.ref(inputs.caches[0][0])

    del inputs

    assert held() is None
    assert torch.equal(other.run(decoder), expected)


def test_what_does_not_fit_is_refused(native: ctypes.CDLL) -> None:
    case = Case(SMALL, [1], [1])
    generator = torch.Generator().manual_seed(1)
    decoder = PackedDecoder(native, SMALL, make_layers(case, torch.float32, generator))
    inputs = Inputs.build(case, torch.float32, generator)

    with pytest.raises(ValueError, match=r"key_cache is torch\.bfloat16"):
        inputs.copy(torch.bfloat16).run(decoder)
    inputs.hidden = inputs.hidden[:, :4]
    with pytest.raises(ValueError, match=r"hidden is torch\.float32 \[1, 4\]"):
        inputs.run(decoder)


def test_this_machine_has_a_library() -> None:
    assert library.load(), "no CPU kernels are built: run `make kernels` on a machine with g++"
