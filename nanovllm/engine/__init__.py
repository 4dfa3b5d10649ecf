"""Who runs, on which blocks, and the one place where policy meets the device."""
