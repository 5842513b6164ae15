"""Hugging Face models, unmodified, from a config with random weights: stage 3 has the bits of stage 2.

Needs the extra ``hf``. Mixtures of experts whose experts are modules of their own are declared leaves.
"""

import pytest
import torch

import deepzero
from deepzero import zero
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import check_alike, config, step_from

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {"vocab_size": 101, "max_position_embeddings": 16, **SMALL}
EXPERTS = {**TEXT, "num_key_value_heads": 2, "num_experts_per_tok": 1}
MODELS = {
    # Tied.
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "llama": ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 3}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {
        **EXPERTS, "num_experts": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    }),
    # One embedding, used three times.
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
    "bert": ("BertForMaskedLM", TEXT),
    "vit": ("ViTForImageClassification", {**SMALL, "image_size": 16, "patch_size": 4, "num_labels": 5}),
}  # fmt: skip
"""Class of the model, arguments of its config."""


def batch(kind, step, rank):
    generator = torch.Generator().manual_seed(50 * step + rank)
    if kind == "vit":
        images = torch.randn(3, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 5, (3,), generator=generator)}
    ids = torch.randint(3, 101, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def build(kind, stage, settings):
    """Dropout off: each rank's mask would have to be the same in both runs, which it is, but the point is elsewhere."""
    torch.manual_seed(0)
    name, given = MODELS[kind]
    model_class = getattr(transformers, name)
    with zero.Init(enabled=stage == "init", config_dict_or_path=settings if stage == "init" else None):
        model = model_class(model_class.config_class(**given))
    blocks = {type(m).__name__ for m in model.modules() if type(m).__name__.endswith(("SparseMoeBlock", "MoE"))}
    if blocks and stage != 2:
        zero.set_z3_leaf_modules(model, blocks)
    return model.eval()


OFTEN = [(kind, ("bf16", "fp32")[number % 2]) for number, kind in enumerate(MODELS)]


@pytest.mark.parametrize(("kind", "precision"), sampled(OFTEN, MODELS, ("fp32", "bf16")))
@on_ranks(timeout=110)
def test_same_bits(rank, world, kind, precision):
    outcomes = []
    for stage in (2, 3, "init"):
        settings = config(stage=2 if stage == 2 else 3, precision=precision, bucket=5000, overlap=True)
        if stage != 2:
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 40 if stage == 3 else 0
        engine, *_ = deepzero.initialize(model=build(kind, stage, settings), config=settings)
        losses = []
        for step in range(3):
            inputs = batch(kind, step, rank)
            if precision == "bf16" and "pixel_values" in inputs:
                inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
            step_from(engine, engine(**inputs).loss)
            losses.append((engine.last_step.loss, engine.last_step.grad_norm))
        outcomes.append((losses, engine.params_sha256()))
    assert outcomes == [outcomes[0]] * 3
    check_alike(outcomes[0])
