"""Several ranks: threads of one process that take turns in virtual time, or processes of torch.distributed."""
