"""Which accesses nothing orders, found from inside the program on a device that cannot be asked."""
