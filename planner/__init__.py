"""How many workers each pool needs. Pure but for its connector."""
