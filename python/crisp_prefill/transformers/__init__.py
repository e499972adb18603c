"""Importing this registers the attention `crisp` with transformers: function and mask, one name.

    import crisp_prefill.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="crisp")
    with crisp_prefill.use(model, crisp_prefill.Crisp(alpha=1.25)):
        with crisp_prefill.record() as report:
            model.generate(**inputs)
    pandas.DataFrame(report.rows())

Prefill runs under the policy. Decode, and everything a sparse kernel must not touch, runs in `sdpa`,
and what SDPA cannot express in `eager`; the reason is counted.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from ._capture import Captured, Loss, capture, measure
from ._forward import crisp_attention_forward
from ._masks import crisp_mask
from ._record import Entry, Recording, record
from ._settings import Settings, settings_of, use

NAME = "crisp"

# On the classes: an entry of one instance is not seen by the code that makes masks, and without a
# mask function of the same name every mask is dropped without a word.
AttentionInterface.register(NAME, crisp_attention_forward)
AttentionMaskInterface.register(NAME, crisp_mask)

__all__ = [
    "Captured", "Entry", "Loss", "NAME", "Recording", "Settings", "capture",
    "crisp_attention_forward", "crisp_mask", "measure", "record", "settings_of", "use",
]
