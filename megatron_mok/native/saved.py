"""The order in which the kernels save h."""

from __future__ import annotations

from torch import Tensor

_TILE_COLUMNS = 128  # columns of I of one GEMM tile


def unpack_h(h: Tensor) -> Tensor:
    """Rows [S, 2I], gate columns before up columns, from the h of the kernels; for tests and for debugging.

    h [S, 2I] holds, for each group of 8 rows and tile of 128 columns of I, 8 vectors x 32 lanes x 8 values:
    lane l has row l // 4; vectors 0, 1, 4, 5 are of the gate, 2, 3, 6, 7 of up. The n-th vector of either has
    four pairs j = 4n .. 4n+3, pair j being columns 8 * j + 2 * (l % 4) and the next. This is how the tensor
    cores hand a tile out, so that saving it is one 16-byte store a lane and vector.
    """
    rows, columns = h.shape
    tiles = columns // (2 * _TILE_COLUMNS)
    # group, tile, half of the columns, gate or up, vector, lane's row and column, pair of the vector, element
    split = h.reshape(rows // 8, tiles, 2, 2, 2, 8, 4, 4, 2)
    return split.permute(0, 5, 3, 1, 2, 4, 7, 6, 8).reshape(rows, columns)
