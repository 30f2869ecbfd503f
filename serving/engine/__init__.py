"""Engines: typed work in, one batch of outputs per step out. Knows nothing of HTTP, SSE, text or Ray."""
