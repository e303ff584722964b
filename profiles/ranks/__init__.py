"""Ranks of a run: threads of one process in virtual time, or processes of torch.distributed."""
