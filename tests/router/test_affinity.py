"""Where prompts go among several replicas: to their cached beginnings, and evenly."""

import random
from collections import Counter

import pytest

from router.affinity import BLOCK_TOKENS, SLACK_TOKENS, PrefixAffinity, block_hashes, within_bound

NAMES = ["a", "b", "c", "d"]
IDLE = dict.fromkeys(NAMES, 0)


def prompt(*words: tuple[int, int]) -> list[int]:
    """Tokens: of each (word, length), the word repeated."""
    return [word for word, length in words for _ in range(length)]


def test_a_prompt_that_continues_another_follows_it() -> None:
    affinity = PrefixAffinity()
    turn = prompt((1, 400))
    place = affinity.choose(block_hashes(turn, ""), IDLE)

    for length in (50, 500, 2000):
        longer = block_hashes([*turn, *prompt((length, length))], "")
        assert affinity.choose(longer, IDLE) == place


def test_the_longest_beginning_decides() -> None:
    affinity = PrefixAffinity()
    system = prompt((1, 160))
    first = affinity.choose(block_hashes([*system, *prompt((2, 160))], ""), IDLE)
    # Another conversation with the same system message, pushed elsewhere by a load.
    busy = {**IDLE, first: 10 * SLACK_TOKENS}
    second = affinity.choose(block_hashes([*system, *prompt((3, 160))], ""), busy)

    assert second != first
    assert affinity.choose(block_hashes([*system, *prompt((2, 160), (4, 50))], ""), IDLE) == first
    assert affinity.choose(block_hashes([*system, *prompt((3, 160), (4, 50))], ""), IDLE) == second


def test_routers_that_never_spoke_agree() -> None:
    prompts = [block_hashes(prompt((number, 200)), "") for number in range(50)]
    one, other = PrefixAffinity(), PrefixAffinity()

    for hashes in prompts:
        expected = one.choose(hashes, IDLE)
        assert other.choose(hashes, dict(reversed(IDLE.items()))) == expected


def test_a_replica_that_goes_moves_nothing_but_its_own() -> None:
    prompts = [block_hashes(prompt((number, 200)), "") for number in range(200)]
    before = [PrefixAffinity().choose(hashes, IDLE) for hashes in prompts]
    without = {name: 0 for name in NAMES if name != "b"}
    after = [PrefixAffinity().choose(hashes, without) for hashes in prompts]

    assert before.count("b") > 20
    assert all(now == then for then, now in zip(before, after, strict=True) if then != "b")


def test_a_prompt_shorter_than_a_block_goes_to_the_least_busy() -> None:
    loads = {"a": 3, "b": 1, "c": 2}
    assert PrefixAffinity().choose(block_hashes([1] * (BLOCK_TOKENS - 1), ""), loads) == "b"


def test_salts_keep_prompts_apart() -> None:
    tokens = prompt((1, 64))
    assert not set(block_hashes(tokens, "one")) & set(block_hashes(tokens, "other"))


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ({"a": 0, "b": 0}, ["a", "b"]),
        ({"a": 100 * SLACK_TOKENS, "b": 0}, ["b"]),
        ({"a": SLACK_TOKENS, "b": 0}, ["a", "b"]),
        ({"a": 10**6, "b": 10**6, "c": 2 * 10**6}, ["a", "b"]),
        ({"a": 10**9}, ["a"]),
    ],
)
def test_who_is_far_above_the_mean_gets_nothing(loads: dict[str, int], expected: list[str]) -> None:
    assert list(within_bound(loads)) == expected


def test_what_is_remembered_is_bounded() -> None:
    affinity = PrefixAffinity(max_remembered=100)
    for number in range(50):
        affinity.choose(block_hashes(prompt((number, 160)), ""), IDLE)
    assert len(affinity._places) == 100


def test_hits_and_evenness_on_shared_prefixes() -> None:
    """40 system messages of different popularity, each with its users' questions, on four replicas.

    Of what one replica's cache would hit, nine tenths are hit here, and no replica computes more than 1.25
    times its share.
    """
    rng = random.Random(5)
    affinity = PrefixAffinity()
    systems = [prompt((1, 32), (100 + number, rng.randrange(200, 1500))) for number in range(40)]
    popularity = [1 / (rank + 1) for rank in range(len(systems))]
    caches: dict[str, set[bytes]] = {name: set() for name in NAMES}
    alone: set[bytes] = set()
    hits, single_hits, work = 0, 0, Counter[str]()
    loads = dict(IDLE)
    running: list[tuple[str, int]] = []
    for _ in range(3000):
        system = rng.choices(systems, popularity)[0]
        hashes = block_hashes([*system, *(rng.randrange(1000, 30000) for _ in range(150))], "")
        place = affinity.choose(hashes, loads)
        cost = BLOCK_TOKENS * sum(block not in caches[place] for block in hashes) + 150
        hits += sum(block in caches[place] for block in hashes)
        single_hits += sum(block in alone for block in hashes)
        caches[place].update(hashes)
        alone.update(hashes)
        work[place] += cost
        loads[place] += cost
        running.append((place, cost))
        if len(running) > 256:
            ended, tokens = running.pop(0)
            loads[ended] -= tokens

    assert hits >= 0.9 * single_hits
    assert max(work.values()) <= 1.25 * sum(work.values()) / len(NAMES)
