"""Figures of this process, as a scrape would find them."""

from collections.abc import Callable

from prometheus_client import REGISTRY


def sample(name: str, /, **labels: str) -> float:
    """What a metric says now."""
    value = REGISTRY.get_sample_value(name, labels)
    assert value is not None, (name, labels)
    return value


def growth(name: str, /, **labels: str) -> Callable[[], float]:
    """By how much a counter, which may not be there yet, has grown since this call."""
    before = REGISTRY.get_sample_value(name, labels) or 0.0
    return lambda: (REGISTRY.get_sample_value(name, labels) or 0.0) - before
