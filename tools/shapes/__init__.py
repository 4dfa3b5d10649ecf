"""Makes the small model of assets/shapes-vl: its folder, its training data, its training forward pass."""
