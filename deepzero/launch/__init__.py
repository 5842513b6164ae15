"""Starting ranks, and what surrounds the program of each: the launcher imports no torch."""
