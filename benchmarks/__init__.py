"""What example.py, bench.py and test_partial_recompute.py run, and how they measure and report it."""
