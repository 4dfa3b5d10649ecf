"""Finds out how right reuse is: questions, answered in full and with reused image KV, compared."""
