"""The order in which the kernels save h."""

from __future__ import annotations

from torch import Tensor

_TILE_COLUMNS = 128  # columns of I of one GEMM tile


def unpack_h(h: Tensor) -> Tensor:
    """Rows [S, 2I], gate columns before up columns, from the h of the kernels; for tests and for debugging.

    h [S, 2I] holds, for each group of 8 rows and tile of 128 columns of I, 8 vectors x 32 lanes x 8 values:
    lane l has row l // 4; its vector v has four pairs j = 4v .. 4v+3, pair j being columns
    8 * (j % 16) + 2 * (l % 4) and the next of the gate (j < 16) or of up. This is how the tensor cores hand a
    tile out, so that saving it is one 16-byte store a lane and vector.
    """
    rows, columns = h.shape
    tiles = columns // (2 * _TILE_COLUMNS)
    # group, tile, gate or up, vector, lane's row, lane's column, pair of the vector, element of the pair
    split = h.reshape(rows // 8, tiles, 2, 4, 8, 4, 4, 2)
    return split.permute(0, 4, 2, 1, 3, 6, 5, 7).reshape(rows, columns)
