"""Runnable benchmarks, one module a question: `python -m benchmarks.NAME --json`."""
