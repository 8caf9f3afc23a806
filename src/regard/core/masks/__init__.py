"""Masks: who may attend to whom.

A mask is a value: a rule `mask(batch, head, query_position, key_position) -> bool`, and **True means "may attend"**,
always. Masks compose with `&`, `|` and `~` into a small expression tree, so that a computation can ask for the tree's
structure (a band of positions? an interval of keys?) instead of building a dense T×S tensor.

Positions are absolute. With S keys and T queries, query i is at position S - T + i, so that the last query is at the
last key: a decode step, a chunked prefill and the whole sequence all mean the same thing.
"""

from regard.core.masks.arguments import FAR, whole_number
from regard.core.masks.base import And, Mask, MaskFunction, Not, Or, Part, Span, Terms
from regard.core.masks.drawing import Drawing
from regard.core.masks.packed import Packed, Segments, segments
from regard.core.masks.paddings import Padding, padding, padding_of
from regard.core.masks.positions import Band, GlobalTokens, Window, Window2d, causal, global_tokens, window, window2d
from regard.core.masks.unstructured import Dense, Function, as_mask, dense

__all__ = [
    "Mask", "MaskFunction", "Span", "Terms", "And", "Or", "Not", "Part", "Drawing", "as_mask", "whole_number", "FAR",
    "Band", "causal", "Window", "window", "Window2d", "window2d", "GlobalTokens", "global_tokens",
    "Padding", "padding", "padding_of", "Segments", "segments", "Packed", "Dense", "dense", "Function",
]  # fmt: skip
