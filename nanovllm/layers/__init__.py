"""The building blocks that every architecture is put together from."""
