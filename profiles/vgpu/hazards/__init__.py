"""The hazard checker: finds accesses to memory that nothing orders.

It orders operations by vector clocks of the host and the streams, and keeps a shadow memory of recent accesses. It sees
a device through the two protocols of ``blocks`` only, and serves the virtual GPU and a real one.
"""
