"""Experiments on what a picture's KV carries of the place and the context it was computed in."""
