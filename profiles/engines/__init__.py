"""Engines of other projects, which run on the virtual GPU in processes of their own."""
