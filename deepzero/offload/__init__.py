"""ZeRO-Offload: optimizer state in the CPU's memory, and the optimizer's arithmetic where its state lies."""
