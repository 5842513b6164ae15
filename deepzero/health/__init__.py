"""What finds out why ranks do not go on: injected into ``comm/`` as the observer of its process groups."""
