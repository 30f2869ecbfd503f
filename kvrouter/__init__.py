"""Where a request goes: hashing, index, cost, policies. Pure: no Ray, no asyncio, no torch, no HTTP."""
