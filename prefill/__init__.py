"""The prefill side of a worker: chunks, leases, announcing KV to its reader."""
