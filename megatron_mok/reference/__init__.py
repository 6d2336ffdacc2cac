"""Plain torch: the exact schedule, the mathematics of the layer and the exchange between ranks.

It is the CPU back end and the oracle that the kernels are tested against. Clear before fast.
"""
