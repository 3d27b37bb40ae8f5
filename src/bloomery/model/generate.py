"""Continue a text: a plain loop of full forwards, to look at a model, not to serve it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from bloomery.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    eod_id: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    each: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Tensor:
    """`tokens` (B, S) with up to max_new_tokens appended; ends early once every row has met eod_id (shorter rows are
    filled with it). `model`: a Decoder in evaluation mode.

    Temperature 0 takes the likeliest token; `top_p` chooses among the likeliest that together have this probability.
    Ids of padding rows never come out. Beyond its seq_length the model sees only the last tokens. The draws depend on
    `seed` alone, not on the device. `each`: may count the tokens as they come.
    """
    config, random = model.config, torch.Generator().manual_seed(seed)
    done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in each(range(max_new_tokens)):
        logits = model(tokens[:, -config.seq_length :])[:, -1, : config.vocab_size].float().cpu()
        chosen = torch.where(done, eod_id, _pick(logits, temperature, top_k, top_p, random).to(tokens.device))
        done |= chosen == eod_id
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
        if bool(done.all()):
            break
    return tokens


def _pick(logits: Tensor, temperature: float, top_k: int | None, top_p: float, random: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    scaled = (logits - logits.max(-1, keepdim=True).values) / temperature  # so that a tiny temperature cannot overflow
    chances = scaled.softmax(-1)
    if top_p < 1:
        ordered, order = chances.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= max(top_p, 1e-9), 0)  # the first one stays
        chances = torch.zeros_like(chances).scatter(-1, order, ordered)
    return torch.multinomial(chances, 1, generator=random)[:, 0]
