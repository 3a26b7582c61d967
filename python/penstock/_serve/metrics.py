"""What a server counts, as Prometheus reads it. All of it is changed on the event loop's thread."""

from __future__ import annotations

from collections import Counter
from typing import Any, List, Mapping, Tuple

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    def __init__(self) -> None:
        self.requests: "Counter[Tuple[str, int]]" = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled = 0
        self._first = [0] * (len(_BUCKETS) + 1)
        self._first_seconds = 0.0

    def first_token(self, seconds: float) -> None:
        """A text has begun, so long after its request came."""
        self._first[next((i for i, bound in enumerate(_BUCKETS) if seconds <= bound), len(_BUCKETS))] += 1
        self._first_seconds += seconds

    def text(self, running: int, waiting: int, report: Mapping[str, Any]) -> str:
        """report: of the LLM."""
        lines: List[str] = []

        def metric(name: str, kind: str, what: str, *samples: Tuple[str, float]) -> None:
            lines.append(f"# HELP penstock_serve_{name} {what}\n# TYPE penstock_serve_{name} {kind}")
            lines.extend(f"penstock_serve_{name}{labels} {value:g}" if isinstance(value, float) else f"penstock_serve_{name}{labels} {value}" for labels, value in samples)

        metric("requests_total", "counter", "Requests that were answered.", *((f'{{route="{route}",status="{status}"}}', n) for (route, status), n in sorted(self.requests.items())))
        metric("texts_running", "gauge", "Texts that the passes make.", ("", running))
        metric("texts_waiting", "gauge", "Texts that wait for their turn.", ("", waiting))
        metric("prompt_tokens_total", "counter", "Tokens of prompts.", ("", self.prompt_tokens))
        metric("generated_tokens_total", "counter", "Tokens of texts that have ended.", ("", self.generated_tokens))
        metric("texts_cancelled_total", "counter", "Texts that were cancelled: clients that left, time that ran out, the server's end.", ("", self.cancelled))
        metric("weight_read_bytes_total", "counter", "Bytes of weights that were read.", ("", int(report["weight_read_bytes"])))
        if "experts" in report:
            experts = report["experts"]
            metric("expert_hits_total", "counter", "Experts that layers used and found in memory.", ("", int(experts["hits"])))
            metric("expert_misses_total", "counter", "Experts that layers used and that were not in memory.", ("", int(experts["misses"])))
            metric("expert_guesses_total", "counter", "Experts that were read before a router had chosen them.", ("", int(experts["guesses"])))
            metric("expert_right_guesses_total", "counter", "Of these, that a layer used.", ("", int(experts["right_guesses"])))
            metric("expert_read_bytes_total", "counter", "Bytes of experts that were read.", ("", int(experts["read_bytes"])))
            metric("expert_wait_seconds_total", "counter", "Waits for experts.", ("", float(experts["stall_seconds"] + experts["stall_guessed_seconds"])))
        total, samples = 0, []
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._first):
            total += count
            samples.append((f'_bucket{{le="{bound}"}}', total))
        metric("first_token_seconds", "histogram", "From a request to the first part of its text.", *samples, ("_sum", self._first_seconds), ("_count", total))
        return "\n".join(lines) + "\n"
