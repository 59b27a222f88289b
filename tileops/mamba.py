"""The public face of the operators: construct one, then call it.

The constructor takes what a kernel is compiled with, and it stays so; the call takes the tensors; ``forward`` documents the call.
"""

from tileops.ops.chunk_coupling import SSDChunkCouplingFwdOp
from tileops.ops.chunk_cumsum import SSDChunkCumsumFwdOp
from tileops.ops.chunk_scan import SSDChunkScanFwdOp
from tileops.ops.chunk_state import SSDChunkStateFwdOp
from tileops.ops.mamba2 import Mamba2FwdOp
from tileops.ops.recurrent import SSDRecurrentFwdOp
from tileops.ops.state_passing import SSDStatePassingFwdOp

__all__ = [
    "Mamba2FwdOp",
    "SSDChunkCouplingFwdOp",
    "SSDChunkCumsumFwdOp",
    "SSDChunkScanFwdOp",
    "SSDChunkStateFwdOp",
    "SSDRecurrentFwdOp",
    "SSDStatePassingFwdOp",
]
