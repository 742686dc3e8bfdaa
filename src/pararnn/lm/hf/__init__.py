"""Hugging Face's doors to the language models: a thin adapter, registered with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from pararnn.lm.hf.config import ParaRNNConfig
from pararnn.lm.hf.model import ParaRNNForCausalLM, ParaRNNModel

AutoConfig.register(ParaRNNConfig.model_type, ParaRNNConfig)
AutoModel.register(ParaRNNConfig, ParaRNNModel)
AutoModelForCausalLM.register(ParaRNNConfig, ParaRNNForCausalLM)

__all__ = ["ParaRNNConfig", "ParaRNNForCausalLM", "ParaRNNModel"]
