"""A device that works as late as the order of its streams allows, so that a missing wait becomes a wrong token."""
