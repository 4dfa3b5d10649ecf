"""Everything the host knows of pictures, without torch: what a prompt holds, what it is called, where it stands."""
