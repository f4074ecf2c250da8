"""Bounds of numbers in schemas, narrowed to what xgrammar 0.2 writes: up to six digits after the point."""

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Final

MAX_BOUND: Final = 2**63 - 1
_STEP: Final = Decimal("0.000001")
# Below it, a double tells such steps apart; above it, bounds are whole.
_MAX_STEPPED: Final = Decimal(2**53) * _STEP
_EXACT: Final = Context(prec=50)


class BoundsError(ValueError):
    """Bounds that can't be kept; the message names them, not where they stand."""


def narrowed(bounds: Mapping[str, int | float], whole: bool) -> dict[str, int | float]:
    """`minimum` and `maximum` of the numbers that can be written within `bounds`, if `whole` of integers.

    `bounds` are by keyword: minimum, maximum, exclusiveMinimum, exclusiveMaximum.

    Raises:
        BoundsError: there is no such number, or a bound is too large.
    """
    exact = {keyword: _exact(keyword, bound) for keyword, bound in bounds.items()}
    found = {}
    lowest = [_within(exact[key], whole, key) for key in ("minimum", "exclusiveMinimum") if key in exact]
    highest = [_within(exact[key], whole, key) for key in ("maximum", "exclusiveMaximum") if key in exact]
    if lowest:
        found["minimum"] = max(lowest)
    if highest:
        found["maximum"] = min(highest)
    if lowest and highest and found["minimum"] > found["maximum"]:
        kind = "integer" if whole else "number of up to six decimals"
        raise BoundsError(f"{' and '.join(bounds)} leave no {kind}")
    return {key: int(value) if value == int(value) else float(value) for key, value in found.items()}


def _exact(keyword: str, bound: int | float) -> Decimal:
    exact = Decimal(repr(bound))
    if not -MAX_BOUND <= exact <= MAX_BOUND:
        raise BoundsError(f"{keyword} {str(bound)[:30]} is beyond {MAX_BOUND}, either way")
    return exact


def _within(bound: Decimal, whole: bool, keyword: str) -> Decimal:
    """The number next to `bound`, or `bound` itself, that can be written and satisfies it."""
    step = _STEP if not whole and abs(bound) < _MAX_STEPPED else Decimal(1)
    upwards = keyword.endswith("inimum")
    rounded = bound.quantize(step, ROUND_CEILING if upwards else ROUND_FLOOR, _EXACT)
    if keyword.startswith("exclusive") and rounded == bound:
        rounded += step if upwards else -step
    if not whole and Decimal(float(rounded)).quantize(step, context=_EXACT) != rounded:
        raise BoundsError(f"{keyword} {bound} is beyond {2**53}, where doubles aren't told apart")
    return rounded
