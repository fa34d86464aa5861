"""Pages of a KV cache: which page holds each run of 32 slots of each row.

    table   row 0   4  7  2 −1       slot 40 of row 0 is slot 8 of page 7
            row 1   4  7  5 −1       rows 0 and 1 share their first 64 slots; −1: no page yet

All layers that share their `Slots` share one table. A layer's buffers are `[pages, G, 32, K]` and `[pages, G, 32, U]`.
The compiled attention (`kernels.c: attend`) takes for every new token a row of the table, the slot to write and the
number of slots to read, so tokens of many texts and a chunk of one text are the same case.

Pages are what lets rows grow, share a prompt and leave at any time without copying keys: a row is a list of page
numbers, and two rows with the same beginning list the same pages.
"""

from __future__ import annotations

from copy import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

PAGE = 32  # slots of a page


class Pages:
    """The page table of a batch. A page with several users is never written: a row that writes takes a copy."""

    def __init__(self, rows: int, slots: int, device: torch.device, count: int | None = None) -> None:
        self.width = -(-slots // PAGE)  # pages of a full row
        self.count = rows * self.width if count is None else count  # pages that every buffer must have
        self.table = torch.full((rows, self.width), -1, dtype=torch.long, device=device)
        self.users = torch.zeros(self.count, dtype=torch.long, device=device)
        self.free = list(range(self.count - 1, -1, -1))
        self.copies: tuple[Int[Tensor, "C"], Int[Tensor, "C"]] | None = None  # of this pass: from page, to page

    def claim_run(self, start: int, length: int) -> None:
        """`claim` for all rows writing slots start … start + length − 1."""
        first, last = start // PAGE, (start + length - 1) // PAGE + 1
        pages = self.table[:, first:last]
        self._claim((pages < 0) | (self.users[pages] > 1), first)

    def claim(self, rows: Int[Tensor, "W"], slots: Int[Tensor, "W"]) -> None:
        """Before a pass writes these slots: make every page that is written the row's own, and set `copies`."""
        places = slots // PAGE
        pages = self.table[rows, places]
        wanted = torch.zeros_like(self.table, dtype=torch.bool)
        wanted[rows, places] = (pages < 0) | (self.users[pages] > 1)
        self._claim(wanted, 0)

    def _claim(self, wanted: Tensor, first: int) -> None:
        self.copies = None
        if not bool(wanted.any()):
            return
        old, new = [], []
        for row, place in wanted.nonzero().tolist():
            page = int(self.table[row, first + place])
            if page >= 0 and int(self.users[page]) == 1:
                continue  # the others have taken copies
            taken = self.free.pop()
            self.table[row, first + place] = taken
            self.users[taken] = 1
            if page >= 0:
                self.users[page] -= 1
                old.append(page)
                new.append(taken)
        if old:
            device = self.table.device
            self.copies = torch.tensor(old, device=device), torch.tensor(new, device=device)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep, repeat and reorder rows."""
        self.table = self.table[rows]
        self.count = max(self.count, len(rows) * self.width)
        used = self.table[self.table >= 0]
        self.users = torch.bincount(used, minlength=self.count)
        self.free = (self.users == 0).nonzero()[:, 0].flip(0).tolist()

    def view(self, first: int, last: int) -> Pages:
        """The table of rows first … last−1, which shares its pages with this one."""
        part = copy(self)
        part.table, part.copies = self.table[first:last], None
        return part

    def release(self, row: int) -> None:
        """Give back the pages of a row."""
        held = self.table[row][self.table[row] >= 0]
        self.users[held] -= 1
        self.free += held[self.users[held] == 0].tolist()
        self.table[row] = -1

    def share(self, source: int, target: int) -> None:
        """Let row `target` start as a copy of row `source`, without copying a page."""
        self.release(target)
        self.table[target] = self.table[source]
        self.users[self.table[source][self.table[source] >= 0]] += 1

    def adopt(self, row: int, pages: list[int]) -> None:
        """Let an empty row begin with pages that others hold."""
        held = torch.tensor(pages, device=self.table.device)
        self.table[row, : len(pages)] = held
        self.users[held] += 1

    def hold(self, pages: list[int]) -> None:
        """Keep pages although their rows end, as the prefix cache does."""
        self.users[torch.tensor(pages, device=self.users.device)] += 1

    def drop(self, pages: list[int]) -> None:
        """Undo `hold`."""
        held = torch.tensor(pages, device=self.users.device)
        self.users[held] -= 1
        self.free += held[self.users[held] == 0].tolist()

    def pages_to_write(self, first: int, last: int, lengths: Int[Tensor, "B"], count: int) -> int:
        """How many pages a pass takes at most if rows first … last−1 write `count` tokens after their `lengths`."""
        found = 0
        for row, length in enumerate(lengths.tolist(), first):
            pages = self.table[row, length // PAGE : (length + count - 1) // PAGE + 1]
            found += int(((pages < 0) | (self.users[pages] > 1)).sum())
        return found

    @property
    def unshared(self) -> int:
        """Pages that no row uses: free ones, and those that only the prefix cache holds."""
        return self.count - len(self.table[self.table >= 0].unique())

    def take(self, row: int, count: int) -> Int[Tensor, "C"]:
        """Give an empty row its first `count` pages."""
        for place in range(count):
            self.table[row, place] = self.free.pop()
        self.users[self.table[row, :count]] = 1
        return self.table[row, :count]

    def find(self, rows: Int[Tensor, "W"], slots: Int[Tensor, "W"]) -> tuple[Int[Tensor, "W"], Int[Tensor, "W"]]:
        """The page of each slot, and its place in the page."""
        return self.table[rows, slots // PAGE], slots % PAGE

    def gather(self, buffer: Float[Tensor, "P G L K"], count: int) -> Float[Tensor, "B G S K"]:
        """The first `count` slots of every row, in one tensor; where a row has no page, any numbers."""
        pages = self.table[:, : -(-count // PAGE)].clamp(min=0)
        return buffer[pages].transpose(1, 2).flatten(2, 3)[:, :, :count]
