"""What a frontend counts, per request; label values are bounded, never taken from a client."""

from __future__ import annotations

from serving.metrics import TOKEN_BUCKETS, Registry

DECISION_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class FrontendMetrics:
    def __init__(self, registry: Registry) -> None:
        self.requests = registry.counter("requests", "Requests ended, by outcome", ("outcome",))
        self.rejects = registry.counter("admission_rejects", "Requests refused, by reason", ("reason",))
        self.ttft = registry.histogram("ttft_seconds", "From admission to the first token")
        self.itl = registry.histogram("itl_seconds", "Between tokens of a stream, as they arrive")
        self.tpot = registry.histogram("tpot_seconds", "Request duration over its output tokens")
        self.decision = registry.histogram("router_decision_seconds", "One placement", DECISION_BUCKETS)
        self.regret = registry.histogram("router_regret_seconds", "Compute given up for a shorter wait")
        self.predicted_ttft = registry.histogram("predicted_ttft_seconds", "TTFT, as predicted")
        self.ttft_error = registry.histogram("ttft_error_seconds", "Predicted against actual TTFT")
        self.queue = registry.histogram("queue_seconds", "From admission until a worker scheduled it")
        self.e2e = registry.histogram("request_seconds", "From admission to the end")
        self.prompt_tokens = registry.histogram("prompt_tokens", "Prompt lengths", TOKEN_BUCKETS)
        self.output_tokens = registry.histogram("output_tokens", "Output lengths", TOKEN_BUCKETS)
        self.hit_tokens = registry.counter("prefix_hit_tokens", "Prompt tokens found in a cache")
        self.resumes = registry.counter("resumes", "Requests that went on after an attempt failed")
        self.attempt_failures = registry.counter("attempt_failures", "Attempts that failed")
        self.deadlines = registry.counter("deadlines_exceeded", "Deadlines passed, by stage", ("stage",))
