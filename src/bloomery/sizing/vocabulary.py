"""The padded vocabulary: a function of the recipe alone, never of the layout."""

from bloomery.config.recipe import ModelSection


def padded_vocab_size(model: ModelSection) -> int:
    """Rows of the embedding: vocab_size rounded up to vocab_multiple."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def softmax_size(model: ModelSection) -> int:
    """Rows of the head that take part in the softmax: the entries of the tokenizer, unless the recipe wants all."""
    return padded_vocab_size(model) if model.softmax_over_padding else model.vocab_size
