"""Programs for those who work on nanovllm."""
