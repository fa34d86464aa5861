"""Beam search: the likeliest texts that a search of bounded width finds.

Every step keeps, for each prompt, the `beams` likeliest beginnings. Of the likeliest continuations of all of them, one
that ends is put aside with its score, log p(y)/penalty(|y|), if it is among the first `beams`; the others go on. As
`transformers` has it, |y| counts the tokens written, the end token too, and at the last step all that is left ends.
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
from clearhead.models.model import Model
from clearhead.precision.matrix import kernels_on, threads_for

from .filters import Filter, filtered, filters
from .loop import Begun

PIECE = 64  # tokens of the vocabulary, of which the likeliest is found first


@dataclass
class Link:
    """A token of a beginning, and the beginning before it."""

    token: int
    total: float  # log-probability of the beginning up to here
    before: Link | None


@dataclass
class Search:
    """The search for one prompt."""

    config: DecodingConfig
    limit: int
    beams: list[Link | None] = field(default_factory=list)  # what goes on, likeliest first
    ended: list[tuple[float, int, Link]] = field(default_factory=list)  # a heap: the worst is the first
    count: int = 0
    done: bool = False

    def step(self, scores: Sequence[float], parents: Sequence[int], tokens: Sequence[int], length: int) -> list[int]:
        """Sort the likeliest continuations, by now `length` tokens long, into those that end and those that go on.

        Gives the row that each of the new beams continues.
        """
        width, before = self.config.beams, self.beams or [None] * self.config.beams
        self.beams, rows = [], []
        for rank, (total, parent, token) in enumerate(zip(scores, parents, tokens, strict=True)):
            if total == -torch.inf:
                break
            link = Link(token, total, before[parent])
            if token in self.config.ends or length == self.limit:
                if rank < width:
                    self.put_aside(link, length)
            elif len(self.beams) < width:
                self.beams.append(link)
                rows.append(parent)
        self.done = not self.beams or self.hopeless(length)
        return rows

    def put_aside(self, link: Link, length: int) -> None:
        self.count += 1  # of two that are equally good the earlier is kept
        heapq.heappush(self.ended, (link.total / self.config.length_penalty(length), -self.count, link))
        if len(self.ended) > self.config.beams:
            heapq.heappop(self.ended)

    def hopeless(self, length: int) -> bool:
        """Whether what goes on cannot, or may not any more, beat what has ended.

        early_stopping=True     as many as there are beams have ended
        early_stopping=False    … and the likeliest beginning, if it ended now, would be worse than all of them
        early_stopping="never"  … and would be worse at any length: at the longest, which a penalty of α > 0 likes best
        """
        if len(self.ended) < self.config.beams:
            return False
        if self.config.early_stopping is True:
            return True
        penalty, likeliest = self.config.length_penalty, self.beams[0]
        assert likeliest is not None, "a beam that goes on has a token"
        longest = self.config.early_stopping == "never" and penalty.alpha > 0
        return likeliest.total / penalty(self.limit if longest else length) <= self.ended[0][0]

    def best(self) -> list[tuple[float, list[int], list[float]]]:
        """What has ended, best first: score, tokens, and the log-probability of each."""
        ranked = sorted(self.ended, key=lambda item: item[:2], reverse=True)
        return [(score, *followed(link)) for score, _, link in ranked]


def followed(last: Link) -> tuple[list[int], list[float]]:
    """The tokens of a text from its last link, and the log-probability of each."""
    tokens, logprobs = [], []
    here: Link | None = last
    while here is not None:
        tokens.append(here.token)
        logprobs.append(here.total - (here.before.total if here.before else 0.0))
        here = here.before
    return tokens[::-1], logprobs[::-1]


@torch.inference_mode()
def beam_search(model: Model, begun: Begun, limits: Sequence[int], config: DecodingConfig) -> list[Search]:
    """Search from prompts that have been read, one row of `begun` for each of `limits`."""
    width, parts = config.beams, filters(replace(config, never=()))  # which are left out of the few likeliest
    searches = [Search(config, limit) for limit in limits]
    live = list(searches)
    begun.seen = begun.seen if parts else begun.seen[:, :0]
    begun.spread(width)
    device = begun.logits.device
    totals = torch.full((len(live), width), -torch.inf, device=device)
    totals[:, 0] = 0.0  # at first all beams are the same prompt: count it once
    length = 0
    while live:
        length += 1
        forced = torch.tensor([search.limit == length for search in live], device=device)
        said, normalised = foretold(begun, parts, forced.repeat_interleave(width), config.forced_end)
        most = max(2, 1 + len(config.ends)) * width
        top, parents, tokens = likeliest(said, normalised, totals, most, config.never)
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
            begun.select(order)
        else:
            rearranged = torch.tensor(order, device=device)
            begun.state.reorder(rearranged)
            begun.seen = begun.seen[rearranged]
        links = [(search.beams + [None] * width)[:width] for search in live]
        totals = torch.tensor([[link.total if link else -torch.inf for link in row] for row in links], device=device)
        last = torch.tensor([link.token if link else 0 for row in links for link in row], device=device)
        begun.advance(model, last)
    return searches


def foretold(
    begun: Begun, parts: Sequence[Filter], forced: Tensor, forced_end: int | None
) -> tuple[Float[Tensor, "B V"], bool]:
    """What is said of each row's next token, and whether these are log-probabilities already, as filters want them; a
    forced end is certain."""
    said, certain = begun.logits.float(), forced_end is not None and bool(forced.any())
    if not parts and not certain:
        return said, False
    said = said.log_softmax(dim=1)
    said = filtered(said, begun.seen, parts) if parts else said
    if certain:
        ends = torch.full_like(said[:1], -torch.inf)
        ends[:, forced_end] = 0.0
        said = torch.where(forced[:, None], ends, said)
    return said, True


def likeliest(
    said: Float[Tensor, "R V"], normalised: bool, totals: Float[Tensor, "N W"], most: int, never: Sequence[int]
) -> tuple[list[list[float]], list[list[int]], list[list[int]]]:
    """Of each search the likeliest continuations of all its beams: their log-probabilities, which beam each continues,
    and the token. The best of all are among the best of each, so that no table of all sums is made; those that are
    never written are left out of these few."""
    peaks, whole = surveyed(said)
    values, ids = largest(said, min(most + len(never), said.shape[1]), peaks)
    values = values if normalised else values - whole[:, None]
    if never:
        values = values.masked_fill(torch.isin(ids, torch.tensor(never, device=ids.device)), -torch.inf)
    sums = (totals.flatten()[:, None] + values).view(len(totals), -1)
    top = sums.topk(min(most, sums.shape[1]), dim=1)
    parents, tokens = top.indices // values.shape[1], ids.view(len(totals), -1).gather(1, top.indices)
    return top.values.tolist(), parents.tolist(), tokens.tolist()


def surveyed(x: Float[Tensor, "R V"]) -> tuple[Float[Tensor, "R P"], Float[Tensor, "R"]]:
    """Of each row the largest of every PIECE numbers, and log Σ eˣ."""
    (rows, width), library = x.shape, kernels_on(x)
    pieces = -(-width // PIECE)
    if library is None:
        padded = F.pad(x, (0, pieces * PIECE - width), value=-torch.inf)
        return padded.unflatten(1, (pieces, PIECE)).amax(dim=2), x.logsumexp(dim=1)
    peaks, whole, x = x.new_empty(rows, pieces), x.new_empty(rows), x.contiguous()
    library.peaks(x.data_ptr(), rows, width, PIECE, peaks.data_ptr(), whole.data_ptr(), threads_for(x.numel()))
    return peaks, whole


def largest(
    x: Float[Tensor, "R V"], count: int, peaks: Float[Tensor, "R P"]
) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """`x.topk(count)`. Of a long row only the pieces whose own largest are largest are looked through."""
    width, pieces = x.shape[1], peaks.shape[1]
    if pieces <= 2 * count:
        best = x.topk(count, dim=1)
        return best.values, best.indices
    chosen = peaks.topk(count, dim=1).indices
    places = (chosen[:, :, None] * PIECE + torch.arange(PIECE, device=x.device)).flatten(1)
    some = x.gather(1, places.clamp(max=width - 1)).masked_fill(places >= width, -torch.inf)
    best = some.topk(count, dim=1)
    return best.values, places.gather(1, best.indices)
