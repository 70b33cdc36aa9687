"""COPY ... (FORMAT binary) to Arrow record batches, a chunk of whole CopyData frames at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headwater.errors import ProtocolError
from headwater.schema.arrow import arrow_type
from headwater.schema.table import ColumnSchema
from headwater.wire.columns import Bytes, decode_column
from headwater.wire.copy_kernels import COPY_SIGNATURE, copy_fields, copy_rows
from headwater.wire.letters import COPY_DATA, FIELD_BINARY

_FRAME_HEADER = 5
_FIXED_HEADER = 19


class CopyDecoder:
    """Decodes one COPY. Columns whose type has no binary decoder must have been cast to text in the query."""

    def __init__(self, columns: Sequence[ColumnSchema]) -> None:
        self._columns = tuple(columns)
        self._schema = pa.schema([pa.field(c.name, arrow_type(c)) for c in self._columns])
        self._started = False
        self._ended = False

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def ended(self) -> bool:
        """Whether the trailer was seen; a COPY that ends without it is incomplete."""
        return self._ended

    def decode(self, chunk: Bytes) -> pa.RecordBatch | None:
        """The rows of a chunk, or None if it holds none."""
        if len(chunk) == 0:
            return None
        buf, first = chunk, 0
        if not self._started:
            buf, first = self._without_header(chunk)
            self._started = True
        # A tuple takes at least a frame header and a field count, so this is always enough.
        capacity = len(buf) // 2 + 1
        off, end, result = np.empty(capacity, np.int64), np.empty(capacity, np.int64), np.zeros(2, np.int64)
        bad = copy_rows(buf, first, off, end, result)
        if bad != -1:
            raise ProtocolError("malformed COPY binary data", offset=int(bad))
        rows = int(result[0])
        if self._ended and (rows or result[1]):
            raise ProtocolError("COPY binary data after its trailer")
        self._ended = self._ended or bool(result[1])
        return self._rows(buf, off[:rows]) if rows else None

    def _rows(self, buf: Bytes, off: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.RecordBatch:
        n, ncols = len(off), len(self._columns)
        foff, flen = np.empty((ncols, n), np.int64), np.empty((ncols, n), np.int64)
        bad = copy_fields(buf, off, ncols, foff, flen)
        if bad != -1:
            raise ProtocolError(f"COPY row does not have {ncols} fields", offset=int(bad))
        arrays = [decode_column(c, buf, foff[i], flen[i], FIELD_BINARY) for i, c in enumerate(self._columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _without_header(self, chunk: Bytes) -> tuple[Bytes, int]:
        """Step over the file header, which shares its frame with the first tuple; the frame is given a new length."""
        body = chunk[_FRAME_HEADER:]
        if len(body) < _FIXED_HEADER or not np.array_equal(body[: len(COPY_SIGNATURE)], COPY_SIGNATURE):
            raise ProtocolError("COPY binary data without its signature", offset=_FRAME_HEADER)
        if int.from_bytes(body[11:15].tobytes(), "big") & ~0xFFFF:
            raise ProtocolError("COPY binary data with unknown critical flags", offset=_FRAME_HEADER + 11)
        extension = int.from_bytes(body[15:19].tobytes(), "big")
        frame = int.from_bytes(chunk[1:5].tobytes(), "big")
        left = frame - 4 - _FIXED_HEADER - extension
        if left < 0 or frame + 1 > len(chunk):
            raise ProtocolError("COPY binary header longer than its frame", offset=1)
        start = _FIXED_HEADER + extension
        if left == 0:
            return chunk, start + _FRAME_HEADER
        shifted = chunk.copy()
        shifted[start] = COPY_DATA
        shifted[start + 1 : start + 5] = np.frombuffer((left + 4).to_bytes(4, "big"), np.uint8)
        return shifted, start
