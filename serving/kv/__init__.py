"""KV blocks: the pool that owns them, the leases that pin them, the transfers that move them. No HTTP, no Ray."""
