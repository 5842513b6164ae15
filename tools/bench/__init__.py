"""deepzero beside its peers: the same model, data, precision and clipping, interleaved in one run.

``python -m tools.bench.zero`` is the command, and ``python -m tools.bench.gpu all`` everything on one GPU.
Their files, lowest first: ``workload`` (model, tokens, numbers that all share), ``contenders`` (who takes part),
``engines`` and ``peers`` and ``floor`` (how each builds its training step), ``rank`` (one process: build, warm up,
time), ``launch`` (starts ranks and leaves none behind), ``report`` (ratios, limits, tables, the dated page).
``links`` runs the same contenders over links of a given speed, and beside a simulation.

Each of the other commands measures one thing, in processes of its own making, with what ``timing`` holds.
"""
