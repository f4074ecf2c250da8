"""The pool: ref counts and the free list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.block_pool import BlockPool
from scheduler.totals import Totals


def test_a_new_pool_gives_out_every_block_once() -> None:
    pool = BlockPool(5, Totals())

    assert sorted(pool.allocate(5)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.num_used == 5


def test_asking_for_too_many_changes_nothing() -> None:
    pool = BlockPool(3, Totals())
    held = pool.allocate(2)

    with pytest.raises(ValueError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)

    pool.check([held])
    assert pool.num_free == 1


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2, Totals())
    held = pool.allocate(1)
    pool.share(held)

    pool.free(held)
    assert pool.num_used == 1

    pool.free(held)
    assert pool.num_used == 0


@pytest.mark.parametrize("operation", ["share", "free"])
def test_a_free_block_has_no_holder_to_add_or_drop(operation: str) -> None:
    pool = BlockPool(2, Totals())

    with pytest.raises(ValueError, match="block 1 is free"):
        getattr(pool, operation)([1])


def test_the_longest_free_block_goes_first() -> None:
    pool = BlockPool(3, Totals())
    first, second = pool.allocate(1), pool.allocate(1)

    pool.free(second)
    pool.free(first)

    assert pool.allocate(3) == [2, 1, 0]


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(2, Totals())
    pool.allocate(1)

    with pytest.raises(AssertionError, match="ref counts"):
        pool.check([])


@given(st.integers(1, 20), st.lists(st.tuples(st.sampled_from("asf"), st.integers(0, 19)), max_size=60))
def test_counts_hold_under_any_use(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks, Totals())
    tables: list[list[int]] = []
    for kind, number in operations:
        if kind == "a" and number <= pool.num_free:
            tables.append(pool.allocate(number))
        elif kind == "s" and tables:
            table = tables[number % len(tables)]
            pool.share(table)
            tables.append(list(table))
        elif kind == "f" and tables:
            pool.free(tables.pop(number % len(tables)))
        pool.check(tables)
    assert pool.num_free + pool.num_used == num_blocks
