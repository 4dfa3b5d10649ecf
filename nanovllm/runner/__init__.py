"""Device work that is not a model's: a plan's numbers become tensors, and KV is kept and moved."""
