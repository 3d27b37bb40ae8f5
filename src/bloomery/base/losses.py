"""Names of losses, in one place: batches carry labels by them, models return losses by them, every log shows them."""

LM_LOSS = "lm loss"
"""The loss that perplexity, the console and the report's headline refer to."""
SOP_LOSS = "sop loss"
"""Sentence order prediction, of bert."""
