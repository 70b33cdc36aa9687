"""Rows of values as small integers: equal rows get equal codes, NULLs included. Pure, columnar, no Spark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Codes = npt.NDArray[np.int64]


def encode_rows(
    tables: Sequence[pa.Table], columns: Sequence[str], *, zeros_differ: bool = False
) -> tuple[list[Codes], int]:
    """A code per row of each table, over the given columns, and the number of codes.

    `zeros_differ`: rows that are counted, not keys: -0.0 is another value than 0.0.
    """
    total = sum(table.num_rows for table in tables)
    codes: Codes = np.zeros(total, np.int64)
    count = 1 if total else 0
    for column in columns:
        more, more_count = _encode_column([table.column(column) for table in tables], zeros_differ)
        if count == 1:
            codes, count = more, more_count
        else:
            # Both factors are at most the number of rows, so the product fits; renumbering keeps it so.
            distinct, codes = np.unique(codes * more_count + more, return_inverse=True)
            count = len(distinct)
    bounds = np.cumsum([table.num_rows for table in tables])[:-1]
    return list(np.split(codes, bounds)), count


def _encode_column(parts: Sequence[pa.ChunkedArray], zeros_differ: bool) -> tuple[Codes, int]:
    chunks = [chunk for part in parts for chunk in part.chunks]
    values = pa.chunked_array(chunks, type=parts[0].type)
    if pa.types.is_floating(values.type) and zeros_differ:
        bits = pa.int64() if values.type == pa.float64() else pa.int32()
        values = pa.chunked_array([chunk.view(bits) for chunk in values.chunks], type=bits)
    elif pa.types.is_floating(values.type):
        # -0.0 and 0.0 are one key to Postgres and to Spark, two bit patterns to a dictionary.
        values = pc.add(values, pa.scalar(0.0, values.type))
    if pa.types.is_nested(values.type):
        values = pa.chunked_array([pa.array([None if v is None else repr(v) for v in values.to_pylist()], pa.string())])
    encoded = values.combine_chunks().dictionary_encode(null_encoding="encode")
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), max(len(encoded.dictionary), 1)
