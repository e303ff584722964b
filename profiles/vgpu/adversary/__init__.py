"""A device that works as late as its streams' order allows, so that a missing edge becomes a wrong token."""
