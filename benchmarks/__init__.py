"""Measurements that documents cite: speed and accuracy, on a GPU. Never imported by the package.

- ``python -m benchmarks run | compare | table | portable``   speed and errors beside public implementations; see docs/benchmarks.md
- ``shapes``     what is measured; ``inputs``: its tensors; ``reference``: float64; ``timing``: clocks and ceilings
- ``ours``, ``peer_mamba_ssm``, ``peer_tileops010``   how one implementation is called; ``worker`` and ``cold``: the process it runs in
- ``runner``     starts the processes, one an implementation, and merges what they answer; ``compare``, ``table``: reading a result
"""
