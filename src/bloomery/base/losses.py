"""Names of losses and the label without one: batches carry labels by these names, models return losses by them, every
log shows them."""

LM_LOSS = "lm loss"
"""The loss that perplexity, the console and the report's headline refer to."""
SOP_LOSS = "sop loss"
"""Sentence order prediction, of bert."""
IGNORED_LABEL = -100
"""A label without a loss; torch's default."""
