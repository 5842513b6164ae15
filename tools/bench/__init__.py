"""deepzero beside its peers: the same model, data, precision and clipping, interleaved in one run.

``python -m tools.bench.zero`` is the command. How the files depend on each other, lowest first:

    stats       medians and ratios, nothing else
    workload    the model, the tokens and the optimizer's numbers that every contender shares
    contenders  who takes part, in which variants, and what each needs to be installed
    master_adamw  AdamW with fp32 masters, for the peers that bring none
    engines     settings, engines of both libraries, one step of them
    peers · peer_deepspeed · floor   how the other contenders build their training step
    rank        one rank of one contender: build, warm up, time, measure memory, write one JSON file
    launch      starts the ranks, with a time limit, and leaves none behind
    bars        the limits that deepzero sets itself, as pass or fail
    report      tables for the terminal and the dated page under docs/benchmarks
    zero        the command line: rounds, and which variants stay after the first one

Three more commands measure one thing each: ``cpu_adam``, ``checkpoints``, and ``gpu``, which is ZeRO-Offload on one
NVIDIA GPU (gpu_offload: contenders and closed forms; gpu_worker: one contender; gpu_run: processes, budget and results;
gpu_report: the page).
"""
