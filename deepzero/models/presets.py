"""The named model shapes behind ``model=…``: one table, repeated in ``configs/model/`` (a test compares them).

============  ===  =====  =====  ======  ======  =================  ==================================================
name          L    C      H      T       V       parameters         shape of
============  ===  =====  =====  ======  ======  =================  ==================================================
nano          4    128    2      128     256               885,888  PaLM's choices: rope, swiglu, no biases, tied
gpt2_124m     12   768    12     1024    50257         124,439,808  GPT-2
gpt2_350m     24   1024   16     1024    50257         354,823,168  GPT-2 medium
gpt2_1_3b     24   2048   16     1024    50257       1,313,626,112  GPT-3 XL's depth and width, GPT-2's vocabulary
llama_7b      32   4096   32     2048    32000       6,738,415,616  Llama 7B
gpt3_175b     96   12288  96     2048    50257     174,604,259,328  GPT-3 175B, GPT-2's vocabulary
gpt_1t        128  25600  160    2048    50257   1,008,014,617,600  the ZeRO paper's trillion
============  ===  =====  =====  ======  ======  =================  ==================================================

nano is the default run's: bytes, two CPU cores, two minutes. Its shape was measured in runs of that length. Validation
loss, all else equal: rope 1.96 against learned positions 2.41 after 150 steps (at width 256), swiglu 2.06 against gelu
2.14 after 100. Two heads of 64 are as good as four of 32, and forward and backward take 30 % less time.

``L`` blocks · ``C`` width · ``H`` heads · ``T`` tokens per sequence · ``V`` vocabulary.

``adam_lr`` is the rate with which a model of that size was published; that of nano, where a run is short and a batch
has 3,072 tokens, makes larger ones diverge.

Sources: Radford et al. 2019, table 2; Brown et al. 2020, table 2.1 (its 24 heads of 128 for XL do not make 2048: 16
do); Touvron et al. 2023, table 2; Chowdhery et al. 2022, section 2 (PaLM); Smith et al. 2022, section 3 (MT-NLG).
"""

from __future__ import annotations

from deepzero.config.run import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    "nano": ModelConfig(name="nano", n_head=2, position="rope", activation="swiglu", bias=False),
    "gpt2_124m": ModelConfig(
        name="gpt2_124m", vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, adam_lr=6e-4
    ),
    "gpt2_350m": ModelConfig(
        name="gpt2_350m", vocab_size=50257, block_size=1024, n_layer=24, n_head=16, n_embd=1024, adam_lr=3e-4
    ),
    "gpt2_1_3b": ModelConfig(
        name="gpt2_1_3b", vocab_size=50257, block_size=1024, n_layer=24, n_head=16, n_embd=2048, adam_lr=2e-4
    ),
    "llama_7b": ModelConfig(
        name="llama_7b",
        vocab_size=32000,
        block_size=2048,
        n_layer=32,
        n_head=32,
        n_embd=4096,
        ffn_hidden=11008,
        norm="rmsnorm",
        position="rope",
        activation="swiglu",
        bias=False,
        tied=False,
        adam_lr=3e-4,
    ),
    "gpt3_175b": ModelConfig(
        name="gpt3_175b",
        vocab_size=50257,
        block_size=2048,
        n_layer=96,
        n_head=96,
        n_embd=12288,
        activation_checkpointing=True,
        adam_lr=6e-5,
    ),
    "gpt_1t": ModelConfig(
        name="gpt_1t",
        vocab_size=50257,
        block_size=2048,
        n_layer=128,
        n_head=160,
        n_embd=25600,
        activation_checkpointing=True,
        adam_lr=5e-5,
    ),
    "hf": ModelConfig(name="gpt2", library="hf"),
}
"""Preset name to settings; ``hf`` is a shape for other people's models."""
