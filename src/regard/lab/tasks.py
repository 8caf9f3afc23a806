"""The tasks of the five documents, in their order and in our words: the headings of worksheets."""

import re

TASKS = {
    "000.1a": "Scaled scores",
    "000.2a": "The receptive field of argmax attention",
    "000.2b": "Which mask goes where",
    "000.2c": "What multi-head attention costs",
    "000.2d": "Where the bottleneck is",
    "000.3a": "What a norm depends on",
    "000.3b": "How long a normalized vector is",
    "001.B1": "What goes into the encoder",
    "001.B2": "The parts of its layers",
    "001.B2a": "What these parts do",
    "001.B3": "What comes out of the encoder",
    "001.1": "Queries, keys and values",
    "001.2": "Their shapes, before and after projection",
    "001.3": "Splitting into heads",
    "001.4": "The scale",
    "001.5": "Combining the heads",
    "001.init": "The layer's parameters, in code",
    "001.attention": "Attention, in code",
    "001.split": "Splitting, in code",
    "001.combine": "Combining, in code",
    "001.forward": "The whole layer, in code",
    "002.1.1a": "Attention with vectors as columns",
    "002.1.1b": "The factor of the scores",
    "002.1.1c": "A large factor: one value",
    "002.1.1d": "A small factor: the average",
    "002.1.1e": "Noise on a key",
    "002.1.1f": "A key made longer",
    "002.1.2a": "Several heads",
    "002.1.2b": "Heads and the kernels of a convolution",
    "002.1.3a": "Self-attention with several heads",
    "002.1.3b": "When positions are needed",
    "002.1.3c": "Orthogonal keys",
    "002.1.3d": "Attention that is diagonal",
    "002.1.3e": "Attention that is a convolution",
    "002.1.4a": "Attention and recurrence",
    "002.1.4b": "Why self-attention",
    "002.1.4c": "Why several heads",
    "002.1.4d": "Position-wise networks",
    "002.1.4e": "Norms in a block",
    "002.1.5a": "Pictures as patches",
    "002.1.5b": "Vision Transformer and Transformer",
    "002.1.5c": "Positions of patches",
    "002.1.5d": "The classification head",
    "003.1a": "The mean of a score",
    "003.1b": "The variance of a score",
    "003.1c": "The scale of a score",
    "003.2a": "Argmax attention by hand",
    "003.2b": "Gradients of argmax attention",
    "003.3a": "Multi-head attention, in code",
    "003.3b": "Longer values",
    "003.4a": "Multi-query attention: the queries' weights",
    "003.4b": "Multi-query attention: the keys' weights",
    "003.4c": "A decoding step: queries",
    "003.4d": "A decoding step: keys",
    "003.4e": "A decoding step: values",
    "003.4f": "The operations of a step",
    "003.4g": "The memory that a step reads",
    "003.5a": "What heads of GPT look at",
    "003.5b": "What heads of BERT look at",
    "003.5c": "Heads that differ",
    "003.5d": "Heads before training",
    "003.5e": "Patterns of your own",
    "003.6a": "Similarities whose sum is never 0",
    "003.6b": "The quadratic kernel and its features",
    "003.6c": "What softmax attention costs",
    "003.6d": "What linear attention costs",
    "004.12.1": "Counting parameters and weights",
    "004.12.2": "Inputs and outputs of the same size",
    "004.12.3": "Permuted inputs",
    "004.12.4": "Softmax far from 0",
    "004.12.5": "Heads of length D/H",
    "004.12.6": "Pre-training tasks",
    "004.12.7": "One more token",
    "004.12.8": "Less computation for pictures",
    "004.12.9": "Attention between channels",
    "004.12.10": "Features in place of the exponential",
}
"""The heading of each task.

Left out is what no computation can check: how an exercise was worked on (003.7), and opinions on what one sees, such as
what kind of word a head seems to look for (003.5), where the sheets ask for the measure instead; an example in prose
(002.1.4, 002.1.5a), where they ask for the number that the example is about; and a proof as text (000.1a, 000.3b,
004.12.3), where they ask for the formula that it ends with.
"""


def covers(claim: str, task: str) -> bool:
    """Whether the statement of an experiment is about a task: `003.3` about `003.3a`, but `004.12.1` not `004.12.10`.

    A statement about a whole document covers its tasks; what a statement has after its task, nothing more.

    >>> covers("003.3", "003.3a"), covers("004.12.1", "004.12.10"), covers("003.4.einsum", "003.4c")
    (True, False, True)
    """
    part = re.sub(r"\.[a-z]+$", "", claim)
    rest = task.removeprefix(part)
    return task.startswith(part) and not rest[:1].isdigit()
