"""`DataFrame.mapInArrow` without pandas.

Spark's own method makes its function through `pandas_udf`, which refuses to work where pandas is not installed, although
no step of this way touches it: record batches go in and come out. Spark Connect's client needs pandas anyway, and has its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.sql.utils import is_remote
from pyspark.util import PythonEvalType

ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]


def map_in_arrow(frame: DataFrame, function: ArrowFunction, schema: StructType) -> DataFrame:
    """Each partition's batches through `function`; what it yields must have exactly the types of `schema`."""
    if is_remote():
        return frame.mapInArrow(function, schema)
    # Spark's typed constants don't name this kind of function, and its Column and DataFrame don't show their JVM sides.
    udf = UserDefinedFunction(function, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)  # type: ignore[arg-type,unused-ignore]
    call = udf(*(frame[name] for name in frame.columns))
    return DataFrame(frame._jdf.mapInArrow(call._jc, False, None), frame.sparkSession)  # type: ignore[attr-defined,unused-ignore]
