"""``zero.Init`` and offload together: nothing is ever whole, and CPUAdam knows its masters before it has them."""

from unittest import mock

import pytest
import torch

import deepzero
from deepzero.config.run import ModelConfig
from deepzero.models.gpt import GPT
from deepzero.offload import cpu_adam
from deepzero.offload.adam_kernels import ChunkedAdam
from deepzero.zero import Init
from tests.distributed.training import config, make_batch

WIDE = ModelConfig(
    vocab_size=40, block_size=8, n_layer=3, n_head=2, n_embd=24, tied=False, activation_checkpointing=True
)


def settings(offload, optimizer, chaos=None):
    block = {"stage3_param_persistence_threshold": 30}
    if offload:
        block |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return config(
        stage=3, bucket=200, overlap=True, precision="bf16", chaos=chaos, zero=block,
        optimizer={"type": optimizer, "params": {"lr": 1e-2}}, data_types={"grad_accum_dtype": "bf16"},
    )  # fmt: skip


def run(rank, world, remote, case):
    """Three steps of a GPT that was cut while it was made."""
    torch.manual_seed(3)
    with Init(dtype=torch.bfloat16, remote_device=remote):
        model = GPT(WIDE)
    asked = []

    def choose(request, numel, wanted):
        if numel > 1000:  # initialize tries every optimizer on a few elements first
            asked.append((numel, set(wanted)))
        return ChunkedAdam(), "for this test"

    with mock.patch.object(cpu_adam, "choose_kernel", choose):
        engine, *_ = deepzero.initialize(model=model, config=case)
    losses = []
    for step in range(3):
        ids, labels = (t[2 * rank : 2 * rank + 2] for t in make_batch(step, 2 * world))
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        losses.append(engine.last_step.loss)
    sha = engine.params_sha256()
    engine.destroy()
    return losses, sha, asked


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_that_was_cut_while_it_was_made(ranks, world):
    """The same bits wherever the parts waited, with and without offload; the kernel is chosen for fp32 masters."""
    plain = ranks.run(run, None, settings(False, "CPUAdam"), world_size=world)[0]
    elements = GPT(WIDE).num_parameters()
    assert plain[2] == [(elements, {(torch.float32, torch.bfloat16, None, True)})]
    for remote in (None, "cpu"):
        # "Adam" in a config that offloads is CPUAdam.
        cases = [settings(True, "CPUAdam"), settings(True, "AdamW", chaos=5)]
        losses, sha, asked = ranks.run(run, remote, cases[0], world_size=world)[0]
        assert (losses, sha) == plain[:2]
        assert asked == [(elements, {(torch.float32, torch.bfloat16, torch.bfloat16, True)})]
        late = ranks.run(run, remote, cases[1], world_size=world)[0]
        assert len(set(late[0])) == 3
