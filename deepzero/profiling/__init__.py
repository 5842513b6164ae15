"""Where the time goes: traces of torch.profiler."""
