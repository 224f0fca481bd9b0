"""References for KDA and DeltaNet: the float64 and mpmath recurrences, and an emulator of rounding.

Imports neither `verikda` nor `kernels_cuda`.
"""
