"""The padded vocabulary: a function of the recipe alone, never of the layout."""

from bloomery.config.recipe import ModelSection


def padded_vocab_size(model: ModelSection) -> int:
    """Rows of the embedding: vocab_size rounded up to vocab_multiple."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple
