"""Ray Train with a plain DeepSpeed loop on two workers: ``python ray_program.py STAGE FOLDER``."""

import json
import sys
from pathlib import Path

import torch


def loop(settings):
    """What a worker does. Ray starts workers with their own path, so deepzero is put in DeepSpeed's place here."""
    import ray.train

    from deepzero.compat import install

    install()
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": settings["stage"]}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    points, losses = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(engine.global_rank)), []
    for batch in points:
        loss = (engine(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    told = {"losses": losses, "world_size": engine.world_size, "sha256": engine.params_sha256()}
    ray.train.report(told)
    if engine.global_rank == 0:
        Path(settings["file"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    # Here: pytest looks for doctests in every file, also where there is no Ray.
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False)
    told = Path(sys.argv[2]) / "told.json"
    TorchTrainer(
        loop,
        train_loop_config={"stage": int(sys.argv[1]), "file": str(told)},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=sys.argv[2]),
    ).fit()
    print("\nSTORY ray " + told.read_text(encoding="utf-8"), flush=True)
    ray.shutdown()
