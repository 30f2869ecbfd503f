"""The decode side of a worker: reserve, read, confirm, go on."""
