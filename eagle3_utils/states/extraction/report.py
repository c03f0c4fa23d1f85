"""The figures of an extraction: of one store in one run, and of several stores together."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ExtractReport:
    """The figures of one run, and of all runs that made the store: a resumed extraction has a rate too."""

    num_samples: int = 0  # stored by this run
    num_resumed: int = 0  # stored before it
    num_tokens: int = 0
    num_retries: int = 0
    state_bytes: int = 0
    seconds: float = 0.0
    client_cpu_seconds: float = 0.0  # of this process, in this run
    builders_cpu_seconds: float = 0.0  # of the processes that built its shards
    num_runs: int = 1
    total_tokens: int = 0
    total_seconds: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Mean over all runs, of the time in which they extracted."""
        return self.total_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """State bytes brought to disk per second, in this run."""
        return self.state_bytes / self.seconds if self.seconds else 0.0

    def table_row(self) -> dict:
        """For the result table of the notebook."""
        return {
            "samples": self.num_resumed + self.num_samples,
            "resumed": self.num_resumed,
            "failed": len(self.failures),
            "tokens": self.total_tokens,
            "seconds": round(self.total_seconds, 1),
            "tokens/s": round(self.tokens_per_second),
            "runs": self.num_runs,
        }


def summarise(reports: dict[str, ExtractReport]) -> dict:
    """The figures of several stores together, for metrics.json. Rates count the time in which requests ran."""
    tokens = sum(report.total_tokens for report in reports.values())
    seconds = sum(report.total_seconds for report in reports.values())
    return {
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "seconds": seconds,
        "num_retries": sum(report.num_retries for report in reports.values()),
        "num_failed": sum(len(report.failures) for report in reports.values()),
        "stores": {name: report.table_row() | {"failures": report.failures} for name, report in reports.items()},
    }
