"""Where a sample comes from: which documents of which shard, for people who want to see what was trained."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.data.shards import ShardReader


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens [start, start + tokens) of one document of a shard, as they stand in a sample."""

    document: int
    start: int
    tokens: int


@dataclass(frozen=True)
class Trace:
    source: str
    epoch: int
    sample: int
    """Number of the sample within its source, whatever the order."""
    documents: list[DocumentSpan]


def document_spans(shard: ShardReader, start_token: int, count: int) -> list[DocumentSpan]:
    """The documents that tokens [start_token, start_token + count) of a shard belong to, in order."""
    spans = []
    while count > 0:
        document, position = shard.index.document_at(start_token)
        tokens = min(count, shard.index.document_start(document + 1) - start_token)
        spans.append(DocumentSpan(document, position, tokens))
        start_token, count = start_token + tokens, count - tokens
    return spans
