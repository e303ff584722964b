"""Values that one forward leaves on the device for the next step (upstream ``FutureMap``, pool-indexed form)."""

from __future__ import annotations

import torch

# What a row holds before its first stash: no token id is negative, so a gather that should not happen shows.
UNSTASHED = -1


class FutureMap:
    """One row per request slot, ``rows`` = slots + 1; row 0 is padding, shared with padded graph rows.

    ``output_tokens_buf`` [rows] int64 is read by the next forward, ``new_seq_lens_buf`` [rows] int64 by the schedule.
    Both are written on whatever stream is current.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.output_tokens_buf = torch.full((rows,), UNSTASHED, dtype=torch.int64, device=device)
        self.new_seq_lens_buf = torch.full((rows,), UNSTASHED, dtype=torch.int64, device=device)

    def stash(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Keep each request's next input token. rows, token_ids: [b]."""
        if rows.shape[0] == 0:
            return
        self.output_tokens_buf[rows] = token_ids.to(torch.int64)

    def publish(self, rows: torch.Tensor, new_seq_lens: torch.Tensor) -> None:
        """Make each request's next length known to the schedule. rows, new_seq_lens: [b] int64."""
        if rows.shape[0] == 0:
            return
        self.new_seq_lens_buf[rows] = new_seq_lens
