"""One architecture a file, built and filled through `registry` and `weights`."""
