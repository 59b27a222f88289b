"""The torch side: one file an operator, each with its checks, its launches and its documentation.

``_base.Op`` decides which target serves a call; ``_planner`` turns a call's shapes and strides into launches; ``_resolve``
loads, compiles or refuses a kernel; ``_checks`` holds the argument checks. The public names are those of ``tileops.mamba``.

In the kernels' launches, B S H G C are batch, seqlen, n_heads, n_groups and num_chunks, M is d_head * d_state; P, N and Q
are d_head, d_state and chunk_len.
"""
