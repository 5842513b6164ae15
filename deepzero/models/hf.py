"""Causal language models of Hugging Face's ``transformers``, unmodified, with random weights: ``model=hf``.

``model.name`` is a model type (``gpt2``, ``llama``, ``mixtral``, ``qwen2_moe`` …); nothing is downloaded. The shape
comes from the same keys as that of our own models, under the names that all of ``transformers`` understands.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor

from deepzero.config.run import ModelConfig
from deepzero.config.strict import ConfigError
from deepzero.models.cross_entropy import cross_entropy
from deepzero.models.generate import TextGenerator


def check_library(config: ModelConfig) -> None:
    """Refuse, before anything starts, a model type that is not there; our own models always are.

    Raises:
        ConfigError: ``transformers`` is not installed, or has no causal language model of that type and shape.
    """
    if config.library == "own":
        return
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("model=hf needs transformers: pip install 'deepzero[hf]'")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model.name={config.name!r}: transformers has no causal language model of this type; it has gpt2, llama, "
            "mistral, mixtral, qwen2, qwen2_moe and others"
        )
    from transformers import AutoConfig

    _shape(AutoConfig.for_model(config.name), config)


class HFModel(TextGenerator):
    """One of them, with the calls of :class:`~deepzero.models.gpt.GPT`.

    Args:
        config: ``name`` is the model type; shape, ``tied``, ``dropout`` and ``activation_checkpointing`` are used.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config = config
        self.model: Any = AutoModelForCausalLM.from_config(_shape(AutoConfig.for_model(config.name), config))
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """Logits [B, T, V], or with ``labels`` [B, T] (not shifted here) their mean cross-entropy, a scalar in fp32."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        if labels is not None:
            return cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits[:, -1:] if last_only else logits

    def flops_per_token(self) -> float:
        """``6 N + 12 L C T`` with all parameters counted: too much for experts, of which a token uses some."""
        c = self.config
        return 6.0 * sum(p.numel() for p in self.parameters()) + 12.0 * c.n_layer * c.n_embd * c.block_size

    def expert_blocks(self) -> set[str]:
        """Names of the classes that choose experts by the data."""
        return {type(m).__name__ for m in self.modules() if type(m).__name__.endswith("SparseMoeBlock")}


def _shape(theirs: Any, config: ModelConfig) -> Any:
    """Our keys under their names; one that is set and that the model type does not have is refused."""
    hidden = ("ffn_hidden", config.ffn_hidden or 4 * config.n_embd)
    theirs.vocab_size, theirs.hidden_size = config.vocab_size, config.n_embd
    theirs.num_hidden_layers, theirs.num_attention_heads = config.n_layer, config.n_head
    theirs.max_position_embeddings, theirs.tie_word_embeddings = config.block_size, config.tied
    optional = dict.fromkeys(
        ("intermediate_size", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size"), hidden
    )
    optional["num_key_value_heads"] = ("n_kv_head", config.n_kv_head or config.n_head)
    optional["head_dim"] = ("head_dim", config.n_embd // config.n_head)
    has = theirs.to_dict()
    optional |= {name: ("dropout", config.dropout) for name in has if "drop" in name and isinstance(has[name], float)}
    for name in optional.keys() & has.keys():
        setattr(theirs, name, optional[name][1])
    for key in ("ffn_hidden", "n_kv_head", "dropout"):
        used = any(optional[name][0] == key for name in optional.keys() & has.keys())
        config.idle_unless(used, f"a model of the type {config.name} has none; leave it out", key)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(theirs, name, None)
    return theirs
