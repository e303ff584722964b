"""Programs that were written for torch on CUDA, run on the virtual GPU."""
