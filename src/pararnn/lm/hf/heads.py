"""Heads that classify texts or tokens."""

from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from pararnn.lm.hf.model import ParaRNNPreTrainedModel


class ParaRNNForSequenceClassification(GenericForSequenceClassification, ParaRNNPreTrainedModel):
    """A label or a number, such as a reward, of each row, from its last token that is not padding.

    Padding is `config.pad_token_id`, on either side. As in transformers' classifiers, `num_labels`
    and `problem_type` of the config define the labels, and `score` is the head.
    """


class ParaRNNForTokenClassification(GenericForTokenClassification, ParaRNNPreTrainedModel):
    """A label of each token, from the tokens up to it; as transformers' classifiers."""
