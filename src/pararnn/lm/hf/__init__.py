"""The language models for transformers: thin adapters, registered with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from pararnn.lm.hf.config import ParaRNNConfig
from pararnn.lm.hf.heads import ParaRNNForSequenceClassification, ParaRNNForTokenClassification
from pararnn.lm.hf.model import ParaRNNForCausalLM, ParaRNNModel

AutoConfig.register(ParaRNNConfig.model_type, ParaRNNConfig)
# Trainer (which shifts labels for label smoothing), pipelines and others look classes up by name.
for _auto, _names, _class in (
    (AutoModel, modeling_auto.MODEL_MAPPING_NAMES, ParaRNNModel),
    (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, ParaRNNForCausalLM),
    (
        AutoModelForSequenceClassification,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        ParaRNNForSequenceClassification,
    ),
    (
        AutoModelForTokenClassification,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        ParaRNNForTokenClassification,
    ),
):
    _auto.register(ParaRNNConfig, _class)
    _names[ParaRNNConfig.model_type] = _class.__name__

__all__ = [
    "ParaRNNConfig",
    "ParaRNNForCausalLM",
    "ParaRNNForSequenceClassification",
    "ParaRNNForTokenClassification",
    "ParaRNNModel",
]
