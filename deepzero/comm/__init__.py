"""Communication, floor 1: the only room of deepzero that imports ``torch.distributed``."""
