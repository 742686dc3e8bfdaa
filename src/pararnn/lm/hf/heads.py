"""Heads that say something of a text or of its tokens."""

from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from pararnn.lm.hf.model import ParaRNNPreTrainedModel


class ParaRNNForSequenceClassification(GenericForSequenceClassification, ParaRNNPreTrainedModel):
    """A label or a number, such as a reward, of each row, said by its last token but padding.

    Padding is `config.pad_token_id`, on either side. As transformers' own classifiers: `num_labels`
    and `problem_type` of the config say what the labels are; `score` is the head.
    """


class ParaRNNForTokenClassification(GenericForTokenClassification, ParaRNNPreTrainedModel):
    """A label of each token, from the tokens up to it; as transformers' own."""
