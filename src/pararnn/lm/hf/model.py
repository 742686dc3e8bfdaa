"""The language models for transformers: a thin adapter around the backbone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from pararnn.base.parameters import Draw, draw
from pararnn.layers import RecurrentLayer
from pararnn.lm.backbone import Backbone
from pararnn.lm.cache import CarriedCache, LayerCache
from pararnn.lm.checkpoint import check_full_precision, remove_older_weights
from pararnn.lm.hf.cache import NAME, NAMES, LayerView, count, either, with_count
from pararnn.lm.hf.config import ParaRNNConfig
from pararnn.lm.hf.inputs import (
    Mask,
    documents_restart,
    left_aligned,
    read_mask,
    require_left,
    require_pieces,
)
from pararnn.lm.loss import Head, logits_loss, mean_loss, next_labels
from pararnn.lm.mixers import Mixer, input_draw
from pararnn.lm.rows import DocumentBorders, Rows, positions_of, rows_of, starts_of
from pararnn.messages.group import OnRanks


def is_recurrent(config: ParaRNNConfig) -> bool:
    """Return whether a layer is recurrent: it cannot go back to an earlier token."""
    return "linear_attention" in config.layer_types


def can_go_back(mixer: Mixer) -> bool:
    """Return whether what a mixer remembers may be cropped: keys, or states at marks."""
    return mixer.layer_type == "full_attention" or mixer.marks


ATTENTION = ("sdpa", "eager", None)
"""Implementations of attention: PyTorch's kernels, or operation by operation."""

INITIALISED = "_is_hf_initialized"
"""Attribute by which transformers marks modules that are not to be drawn again."""


class ParaRNNPreTrainedModel(OnRanks, PreTrainedModel):
    """Base of the models: loading, initialisation, and placement on devices."""

    config_class = ParaRNNConfig
    config: ParaRNNConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = list(NAMES)
    _supports_sdpa = True
    _can_compile_fullgraph = True
    # Parameters per channel stay float32, as solvers read them (the numerics contract).
    _keep_in_fp32_modules_strict = ["cell", "rnn.bias"]

    def __init__(self, config: ParaRNNConfig) -> None:
        super().__init__(config)
        if not is_recurrent(config):
            self._keep_in_fp32_modules_strict = []

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw as `pararnn.LanguageModel` does; transformers protects what was loaded.

        It is called for modules that own parameters, so each of these stores its own draws.
        """
        starts: dict[str, Draw] = module.__dict__.get("starts", {})
        if not starts and isinstance(module, (nn.Embedding, nn.Linear)):  # heads of any kind
            starts = {"weight": input_draw(module.weight.shape[1])}
            if getattr(module, "bias", None) is not None:
                starts["bias"] = Draw("constant")
        for name, start in starts.items():
            draw(getattr(module, name), start)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save as transformers does, and remove the weights of an earlier save in the folder.

        transformers leaves a file beside several that replace it, and would load that file. Raises
        CheckpointError after `quantise_weights`; quantisers of transformers save what they made.
        """
        if getattr(self, "hf_quantizer", None) is None:
            check_full_precision(self)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process and kwargs.get("variant") is None:
            remove_older_weights(Path(save_directory))

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Set it as transformers does, whose count of layers finds only its own class."""
        if every_n_layers < 1:
            raise ValueError(f"every_n_layers must be 1 or more, got {every_n_layers}")
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, every_n_layers)
        for module in self.modules():
            if isinstance(module, Backbone):
                module.checkpoint_every = every_n_layers


def _fetch(layer: nn.Module, args: Any) -> None:
    """Load a cell's parameters that accelerate has offloaded.

    accelerate loads them when a module is called; layers read their cells' parameters without one.
    """
    hook = getattr(layer.cell, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(layer.cell)


def _release(layer: nn.Module, args: Any, result: Any) -> None:
    hook = getattr(layer.cell, "_hf_hook", None)
    if hook is not None:
        hook.post_forward(layer.cell, None)


class ParaRNNModel(ParaRNNPreTrainedModel):
    """The model without a head: token ids to hidden states."""

    def __init__(self, config: ParaRNNConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # transformers passes a dtype as PyTorch's default; given one, cells stay float32.
        self.backbone = Backbone(config.to_lm(), dtype=torch.get_default_dtype())
        for owner, name, start in self.backbone.draws():
            owner.__dict__.setdefault("starts", {})[name] = start
        for module in self.backbone.modules():
            if isinstance(module, RecurrentLayer):
                module.register_forward_pre_hook(_fetch)
                module.register_forward_hook(_release)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        carried: Sequence[CarriedCache] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states (B, T, hidden_size) after the last norm.

        Args:
            input_ids: (B, T); or inputs_embeds (B, T, hidden_size).
            attention_mask: (B, tokens in the cache + T), 1 at tokens and 0 at padding, which may
                stand before and after them, with a cache only before them. Also the masks that
                `generate` makes for static caches, and (B, H, T, S) if all layers are attention.
            position_ids: (B or 1, T); without a cache documents begin where they are 0.
            cache, past_key_values: a transformers cache to continue, by its name since transformers
                5.24 and the one before; DynamicCache(config=config).
            use_cache: whether to return a cache; None is the config's, but False in training, for
                packed documents and for rows that end in padding.
            output_attentions: whether to return the weights (B, H, T, S) of the attention layers;
                None is the config's. Attention is then computed operation by operation, as with
                `attn_implementation` "eager" in the config.
            cu_seq_lens_q, seq_idx: borders of packed documents, as of DataCollatorWithFlattening.
            carried: a cache a layer, for rows in training that continue those of an earlier step;
                they may hold packed documents. Not with a cache.

        Raises ValueError for packed documents with a cache, for padding between tokens or, where a
        cache is used, on the right, and for a cache or a mask in addition to carried states.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, steps = x.shape[:2]
        cache = either(cache, past_key_values)
        has_borders = cu_seq_lens_q is not None or seq_idx is not None
        if carried is not None:
            if cache is not None or use_cache or attention_mask is not None:
                raise ValueError(
                    "carried states continue whole rows: give no cache, use_cache or attention_mask"
                )
            # A document may begin at a row's first token, which only its position tells.
            has_borders, use_cache = has_borders or position_ids is not None, False
        elif self.group:
            if cache is not None or use_cache:
                raise ValueError(
                    "a cache continues whole rows, and ranks share these: give no cache, and "
                    "use_cache=False"
                )
            has_borders, use_cache = has_borders or position_ids is not None, False
        elif not has_borders and position_ids is not None:
            has_cache = cache is not None or bool(use_cache)
            has_borders = documents_restart(position_ids, attention_mask, has_cache)
        if has_borders and (cache is not None or use_cache):
            raise ValueError(
                "packed documents cannot be kept in a cache: give each its own row, padded on the "
                "left, or use_cache=False"
            )
        recurrent = is_recurrent(self.config)
        if cache is not None:
            with_count(cache, self.config.layer_types)
        past = 0 if cache is None else cache.get_seq_length()
        mask = read_mask(attention_mask, batch, steps, past=past, recurrent=recurrent)
        if self.config.batch_invariant and not isinstance(attention_mask, dict):
            require_pieces(mask.attend)
        if self.group and mask.real is None and isinstance(attention_mask, Tensor):
            mask = mask._replace(real=attention_mask.bool())  # another rank may have padding
        if use_cache is None:
            use_cache = self.config.use_cache and not (has_borders or self.training or mask.ends)
        if cache is None and use_cache:
            cache = with_count(DynamicCache(config=self.config), self.config.layer_types)
        views: Sequence[LayerCache] | None = carried
        if cache is None and mask.attend is None:
            positions = position_ids if has_borders else None
            borders = DocumentBorders(mask.real, positions, cu_seq_lens_q, seq_idx)
            attention, group = self.backbone.needs_positions, self.group
            rows = rows_of(batch, steps, x.device, borders, attention=attention, group=group)
            if position_ids is not None:
                rows = rows._replace(positions=position_ids)
        elif self.group:
            raise ValueError(
                "an attention_mask of four dimensions says which tokens of whole rows are seen, "
                "and ranks share these: give one of two dimensions (B, T) for this rank's tokens, "
                "or position_ids of documents"
            )
        elif has_borders:
            raise ValueError(
                "packed documents and an attention_mask of four dimensions both say which tokens "
                "are seen: give one"
            )
        else:
            rows = self._later_rows(x, mask, attention_mask, position_ids, past, cache)
        if cache is not None:
            require_left(mask)
            views = [LayerView(layer, steps) for layer in cache.layers]
        implementation = self.config._attn_implementation
        if implementation not in ATTENTION:
            raise ValueError(f"attn_implementation must be sdpa or eager, got {implementation!r}")
        weights: list[Tensor] | None = None
        if self.config.output_attentions if output_attentions is None else output_attentions:
            weights = []
            rows = rows._replace(weights=weights.append)
        elif implementation == "eager":
            rows = rows._replace(weights=_ignore)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: list[Tensor] | None = [] if output_hidden_states else None
        out = self.backbone(x, rows, views, None if states is None else states.append)
        if cache is not None:
            count(cache, x)
        return BaseModelOutputWithPast(
            last_hidden_state=out,
            hidden_states=None if states is None else (*states, out),
            attentions=None if weights is None else tuple(weights),
            **{NAME: cache},
        )

    def _later_rows(
        self,
        x: Tensor,
        mask: Mask,
        argument: Any,
        position_ids: Tensor | None,
        past: Tensor | int,
        cache: Cache | None,
    ) -> Rows:
        """Build the rows after those of a cache, or of a mask by keys.

        transformers makes attention's masks for its kinds of cache. argument: the attention_mask.
        """
        attend = mask.attend
        if position_ids is None and isinstance(argument, Tensor) and argument.ndim == 2:
            position_ids = positions_of(argument.to(x.device))[:, -x.shape[1] :]
        elif position_ids is None:
            position_ids = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
        if self.backbone.needs_positions and attend is None and not isinstance(argument, dict):
            attend = create_causal_mask(
                config=self.config,
                inputs_embeds=x,
                attention_mask=argument,
                position_ids=position_ids,
                **{NAME: cache},
            )
        start, since = starts_of(mask.real)
        return Rows(position_ids, start, since, mask.real, attend)


def _ignore(weights: Tensor) -> None:
    """Do nothing with attention's weights."""


class ParaRNNForCausalLM(ParaRNNPreTrainedModel, GenerationMixin):
    """The language model: token ids to logits, loss and generated text."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a subclass's name with transformers, also that of one made by `fully_shard`."""
        super().__init_subclass__(**kwargs)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __init__(self, config: ParaRNNConfig) -> None:
        super().__init__(config)
        self.model = ParaRNNModel(config)
        # Then states cannot go back: assisted generation would silently differ from greedy.
        self._is_stateful = not all(can_go_back(b.mixer) for b in self.model.backbone.blocks)
        self.vocab_size = config.vocab_size
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.batch_invariant = config.batch_invariant
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits (B, T, vocab_size), and with labels the loss.

        Args:
            labels: (B, T), the tokens themselves, -100 at those without loss. In training the loss
                is computed without making all logits: `logits` is None then.
            logits_to_keep: number of last positions, or an index of positions; 0 is all.
            num_items_in_batch: divisor of the loss, the number of labels over all batches of an
                optimizer step; None is the number in this batch.
            shift_labels: (B, T), the label that each position predicts, in place of `labels`: some
                collators of packed documents make them.
            others: as in `ParaRNNModel.forward`.
        """
        # Not in the signature: transformers would expect such labels in every batch.
        shift_labels = kwargs.pop("shift_labels", None)
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=either(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden = out.last_hidden_state
        loss = logits = None
        targets = labels if shift_labels is None else shift_labels
        if targets is not None:
            if shift_labels is None:
                targets = next_labels(targets, self.group)
            options = {"z_loss": self.config.z_loss}

            def head(num_items: Tensor | int | None) -> Tensor:
                if isinstance(self.lm_head, Head):
                    return self.lm_head(
                        hidden, targets, shift=False, num_items=num_items, **options
                    )
                # An adapter's, whose logits are not those of its weight.
                return logits_loss(self.lm_head(hidden), targets, num_items=num_items, **options)

            loss = mean_loss(head, targets, self.group, num_items_in_batch)
        if targets is None or not self.training:
            keep = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = self.lm_head(hidden[:, keep])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            **{NAME: getattr(out, NAME)},
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Set another head; a linear one, as of `resize_token_embeddings`, becomes a `Head`.

        Others have to make all logits for the loss.
        """
        head = new_embeddings
        if type(head) is nn.Linear and head.bias is None:
            new_embeddings = Head(head.in_features, head.out_features, bias=False, device="meta")
            new_embeddings.weight = head.weight
            new_embeddings.batch_invariant = self.config.batch_invariant
            if hasattr(head, INITIALISED):  # else `post_init` would draw it again
                setattr(new_embeddings, INITIALISED, True)
        super().set_output_embeddings(new_embeddings)

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as `GenerationMixin`, after moving padding on the right to the left.

        The returned rows begin with the prompts padded on the left.
        """
        inputs, kwargs = left_aligned(inputs, kwargs)
        parent: Any = super()  # its annotations need a protocol that mypy does not find here
        return parent.generate(inputs, *args, **kwargs)

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` reads its signature
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare a step's inputs, with the cache by both of its names.

        peft looks for the older one, and would put its prompt before each token without it.
        """
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(*args, **kwargs)
        return {**dict.fromkeys(NAMES, inputs.get(NAME)), **inputs}

    def create_masks_for_generate(self, **kwargs: Any) -> Any:
        """Make `generate`'s masks for `forward` with a static cache, by layer type.

        transformers' function reads single tokens as real, and accepts padding on either side.
        """
        argument, (batch, steps) = kwargs["attention_mask"], kwargs["inputs_embeds"].shape[:2]
        past = kwargs[NAME].get_seq_length()
        mask = read_mask(argument, batch, steps, past=past, recurrent=is_recurrent(self.config))
        require_left(mask)
        return {**create_masks_for_generate(**kwargs), "linear_attention": mask.real}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> Any:
        parent: Any = super()
        result = parent._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if model_kwargs.get(NAME) is not None:
            with_count(model_kwargs[NAME], self.config.layer_types)
        return result
