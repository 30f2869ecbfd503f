"""KV blocks: the pool that owns them, leases that pin them, transfers that move them. No HTTP, no Ray."""
