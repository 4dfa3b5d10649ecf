"""Triton kernels; importable without Triton, each function names its plain-torch equal."""
