"""Beam search: find likely texts with a search of bounded width.

Every step keeps the `beams` most likely partial texts of each prompt and extends all of them. A continuation that ends
and ranks among the first `beams` is finished, with the score log p(y)/penalty(|y|). The best others continue.

As in `transformers`, |y| counts the generated tokens including the end token, and the last step ends every text.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.configs import DecodingConfig
from clearhead.kernels.calls import kernels_on, threads_for
from clearhead.models.model import Model

from .filters import Filter, apply_filters, build_filters
from .loop import PrefilledBatch, check_numbers

BLOCK = 64  # tokens of the vocabulary per maximum: `topk_by_peaks` scans only the best blocks


@dataclass
class Link:
    """A token of a partial text, linked to the token before it."""

    token: int
    total: float  # log-probability of the text up to here
    before: Link | None


@dataclass
class BeamSearch:
    """The beam search of one prompt."""

    config: DecodingConfig
    limit: int
    beams: list[Link | None] = field(default_factory=list)  # partial texts, most likely first
    ended: list[tuple[float, int, Link]] = field(default_factory=list)  # a heap with the worst first
    count: int = 0
    done: bool = False

    def step(self, scores: Sequence[float], parents: Sequence[int], tokens: Sequence[int], length: int) -> list[int]:
        """Split the best continuations, now `length` tokens long, into finished texts and new beams.

        Returns the row that each new beam continues.
        """
        width, before = self.config.beams, self.beams or [None] * self.config.beams
        self.beams, rows = [], []
        for rank, (total, parent, token) in enumerate(zip(scores, parents, tokens, strict=True)):
            if total == -torch.inf:
                break
            link = Link(token, total, before[parent])
            if token in self.config.ends or length == self.limit:
                if rank < width:
                    self.finish(link, length)
            elif len(self.beams) < width:
                self.beams.append(link)
                rows.append(parent)
        self.done = not self.beams or self.cannot_improve(length)
        return rows

    def finish(self, link: Link, length: int) -> None:
        self.count += 1  # of two equal scores, keep the earlier
        heapq.heappush(self.ended, (link.total / self.config.length_penalty(length), -self.count, link))
        if len(self.ended) > self.config.beams:
            heapq.heappop(self.ended)

    def cannot_improve(self, length: int) -> bool:
        """Whether the search can stop. It needs `beams` finished texts, and then

        early_stopping=True     nothing else
        early_stopping=False    the most likely beam, if it ended now, must score worse than all finished texts
        early_stopping="never"  it must score worse at every length (for α > 0 the best case is the longest)
        """
        if len(self.ended) < self.config.beams:
            return False
        if self.config.early_stopping is True:
            return True
        penalty, best = self.config.length_penalty, self.beams[0]
        assert best is not None, "every beam has a token after a step"
        longest = self.config.early_stopping == "never" and penalty.alpha > 0
        return best.total / penalty(self.limit if longest else length) <= self.ended[0][0]

    def best(self) -> list[tuple[float, list[int], list[float]]]:
        """Finished texts, best first: score, tokens, and the log-probability of each token."""
        ranked = sorted(self.ended, key=lambda item: item[:2], reverse=True)
        return [(score, *trace_back(link)) for score, _, link in ranked]


def trace_back(last: Link) -> tuple[list[int], list[float]]:
    """The tokens of a text and their log-probabilities, from its last link."""
    tokens, logprobs = [], []
    here: Link | None = last
    while here is not None:
        tokens.append(here.token)
        logprobs.append(here.total - (here.before.total if here.before else 0.0))
        here = here.before
    return tokens[::-1], logprobs[::-1]


@torch.inference_mode()
def beam_search(model: Model, batch: PrefilledBatch, limits: Sequence[int], config: DecodingConfig) -> list[BeamSearch]:
    """Search from prefilled prompts; each row of `batch` may grow by its number in `limits`."""
    width, filters = config.beams, build_filters(replace(config, banned=()))  # best_continuations drops banned tokens
    searches = [BeamSearch(config, limit) for limit in limits]
    live = list(searches)
    batch.seen = batch.seen if filters else batch.seen[:, :0]
    batch.spread(width)
    device = batch.logits.device
    totals = torch.full((len(live), width), -torch.inf, device=device)
    totals[:, 0] = 0.0  # all beams start as the same prompt: count it once
    length = 0
    while live:
        length += 1
        check_numbers(model, batch.logits)
        forced = torch.tensor([search.limit == length for search in live], device=device)
        scores, normalised = next_scores(batch, filters, forced.repeat_interleave(width), config.forced_end)
        most = max(2, 1 + len(config.ends)) * width
        top, parents, tokens = best_continuations(scores, normalised, totals, most, config.banned)
        rows: list[int] = []
        for i, search in enumerate(live):
            chosen = search.step(top[i], parents[i], tokens[i], length)
            rows += [i * width + parent for parent in (chosen + [0] * width)[:width]]
        kept = [i for i, search in enumerate(live) if not search.done]
        live = [live[i] for i in kept]
        if not live:
            break
        order = [row for i in kept for row in rows[i * width : (i + 1) * width]]
        if len(order) < len(rows):
            batch.select(order)
        else:
            rearranged = torch.tensor(order, device=device)
            batch.state.reorder(rearranged)
            batch.seen = batch.seen[rearranged]
        links = [(search.beams + [None] * width)[:width] for search in live]
        totals = torch.tensor([[link.total if link else -torch.inf for link in row] for row in links], device=device)
        last = torch.tensor([link.token if link else 0 for row in links for link in row], device=device)
        batch.advance(model, last)
    return searches


def next_scores(
    batch: PrefilledBatch, filters: Sequence[Filter], forced: Tensor, forced_end: int | None
) -> tuple[Float[Tensor, "B V"], bool]:
    """The scores of each row's next token, and whether they are log-probabilities or still logits.

    Filters need log-probabilities. A forced end token has log-probability 0.
    """
    scores, forces_end = batch.logits.float(), forced_end is not None and bool(forced.any())
    if not filters and not forces_end:
        return scores, False
    scores = scores.log_softmax(dim=1)
    scores = apply_filters(scores, batch.seen, filters) if filters else scores
    if forces_end:
        ends = torch.full_like(scores[:1], -torch.inf)
        ends[:, forced_end] = 0.0
        scores = torch.where(forced[:, None], ends, scores)
    return scores, True


def best_continuations(
    scores: Float[Tensor, "R V"], normalised: bool, totals: Float[Tensor, "N W"], most: int, banned: Sequence[int]
) -> tuple[list[list[float]], list[list[int]], list[list[int]]]:
    """The best continuations of each search: total log-probabilities, the beam that each continues, and its token.

    The best of all beams are among the best of each beam, so only those are added up and banned tokens removed.
    """
    peaks, whole = block_peaks(scores)
    values, ids = topk_by_peaks(scores, min(most + len(banned), scores.shape[1]), peaks)
    values = values if normalised else values - whole[:, None]
    if banned:
        values = values.masked_fill(torch.isin(ids, torch.tensor(banned, device=ids.device)), -torch.inf)
    sums = (totals.flatten()[:, None] + values).view(len(totals), -1)
    top = sums.topk(min(most, sums.shape[1]), dim=1)
    parents, tokens = top.indices // values.shape[1], ids.view(len(totals), -1).gather(1, top.indices)
    return top.values.tolist(), parents.tolist(), tokens.tolist()


def block_peaks(x: Float[Tensor, "R V"]) -> tuple[Float[Tensor, "R P"], Float[Tensor, "R"]]:
    """The maximum of every BLOCK consecutive numbers of each row, and log Σ eˣ of the row."""
    (rows, width), library = x.shape, kernels_on(x)
    blocks = -(-width // BLOCK)
    if library is None:
        padded = F.pad(x, (0, blocks * BLOCK - width), value=-torch.inf)
        return padded.unflatten(1, (blocks, BLOCK)).amax(dim=2), x.logsumexp(dim=1)
    peaks, whole, x = x.new_empty(rows, blocks), x.new_empty(rows), x.contiguous()
    library.peaks(x.data_ptr(), rows, width, BLOCK, peaks.data_ptr(), whole.data_ptr(), threads_for(x.numel()))
    return peaks, whole


def topk_by_peaks(
    x: Float[Tensor, "R V"], count: int, peaks: Float[Tensor, "R P"]
) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """`x.topk(count)`, which for long rows scans only the `count` blocks with the largest maxima."""
    width, blocks = x.shape[1], peaks.shape[1]
    if blocks <= 2 * count:
        best = x.topk(count, dim=1)
        return best.values, best.indices
    chosen = peaks.topk(count, dim=1).indices
    places = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
    some = x.gather(1, places.clamp(max=width - 1)).masked_fill(places >= width, -torch.inf)
    best = some.topk(count, dim=1)
    return best.values, places.gather(1, best.indices)
