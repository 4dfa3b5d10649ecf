"""The tests of nanovllm: a mirror of the package, on tiny checkpoints that they make themselves."""
