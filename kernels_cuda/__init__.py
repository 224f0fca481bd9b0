"""CUDA kernels of KDA and DeltaNet, and what compiles, caches and launches them on a GPU or on the processor.

include/, host/     the primitives the kernels are written in, for the device and for the processor
*.cu, *.cuh         the kernels, one file per phase of the algorithm
build, host_build   compilers; nvrtc, cache and sources serve them
modules             one launch interface for both
forward, backward   launch plans;  instances: every kernel they can ask for
audit, ptx          what compiled kernels must not contain
"""
