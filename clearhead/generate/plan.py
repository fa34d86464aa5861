"""The scheduler: which waiting request is read next. A pure function, without torch.

Every text being written gets one token per step. A step also reads at most one chunk of one prompt, so no prompt can
stall the others. Requests of one user start in arrival order, and users take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Ticket:
    """What the scheduler knows of a waiting request."""

    number: int  # arrival order
    user: str
    rows: int  # texts that it writes at once


def next_ticket(waiting: Sequence[Ticket], free_rows: int, last_turn: Mapping[str, int]) -> Ticket | None:
    """The request to read next; None if nobody waits or the next one has to wait for rows.

    `last_turn` has the number of the step at which each user last started a request. The user who has waited longest
    comes first. A request that needs more rows than are free is not overtaken, so it cannot starve.
    """
    if not waiting:
        return None
    chosen = min(waiting, key=lambda ticket: (last_turn.get(ticket.user, -1), ticket.number))
    return chosen if chosen.rows <= free_rows else None


def passes(active: int, largest: int) -> list[tuple[int, int]]:
    """Slices of about equal size, at most `largest` rows each, that together cover all active rows."""
    count = -(-active // largest)
    bounds = [active * i // count for i in range(count + 1)] if count else [0]
    return list(pairwise(bounds))
