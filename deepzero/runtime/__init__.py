"""The run time, floors 3 and 4: the engine and what it composes."""
