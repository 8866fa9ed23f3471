"""A Prometheus page, read by exact name. Knows the format, no engine.

Names are never matched by prefix: beside every counter may stand a `_created` sample that holds a
Unix time, and adding that to a count gives nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from outrider.errors import OutriderError


class NotPrometheus(OutriderError, ValueError):
    """A page is not in Prometheus's text format."""

    exit_code = 3


@dataclass(frozen=True)
class Sample:
    """One line: labels and value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scrape:
    """A whole page: sample name, exactly as written, to its samples.

    A counter with labels that has never moved has a type line and no sample; such names are in
    `silent`, and their total is 0.
    """

    samples: Mapping[str, tuple[Sample, ...]]
    silent: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        return name in self.samples or name in self.silent

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all samples of a name that carry these labels; `None` without the name."""
        found = [
            sample.value
            for sample in self.samples.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        ]
        return sum(found) if found or self.has(name) else None

    def mean(self, name: str) -> float | None:
        """The mean over the samples of a name, for gauges of several ranks; `None` without any."""
        found = self.samples.get(name, ())
        return sum(sample.value for sample in found) / len(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sums by the values of one label, such as a histogram's buckets by `le`."""
        found: dict[str, float] = {}
        for sample in self.samples.get(name, ()):
            if label in sample.labels:
                key = sample.labels[label]
                found[key] = found.get(key, 0.0) + sample.value
        return found


def parse(text: str) -> Scrape:
    """Read a page.

    Raises:
        NotPrometheus: it is not in the text format.
    """
    samples: dict[str, list[Sample]] = {}
    silent: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            if not family.samples and family.type == "counter":
                silent.add(f"{family.name}_total")
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as fault:
        raise NotPrometheus(f"the page is not in Prometheus's text format: {fault}") from None
    return Scrape({name: tuple(found) for name, found in samples.items()}, frozenset(silent))
