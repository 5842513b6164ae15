"""DeepSpeed's surface over what is there: the engine that ``initialize`` returns, and its getters."""
