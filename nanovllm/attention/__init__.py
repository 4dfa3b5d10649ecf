"""Attention behind one contract: the caller names a backend, models see only the contract."""
