"""Access to this machine's GPU driver through NVML (``nvidia-ml-py``, the extra ``gpu``).

Nothing here uses CUDA: a process that has opened a device could not fork trial processes any more,
and would hold some of its memory.
"""
