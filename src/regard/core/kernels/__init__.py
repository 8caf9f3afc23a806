"""Kernels for GPUs, in Triton. Nothing here is imported unless a call runs on one."""
