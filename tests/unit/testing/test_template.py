from __future__ import annotations

import struct

import pytest

from headwater.errors import HeadwaterError
from headwater.testing.template import _crc32c, _crc_offset


def test_crc32c_is_castagnoli() -> None:
    assert _crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("offset", [252, 288, 292, 300])
def test_the_checksum_is_found_wherever_a_version_keeps_it(offset: int) -> None:
    content = bytes(range(1, 128)) * 3
    control = content[:offset] + struct.pack("=I", _crc32c(content[:offset])) + bytes(7000)
    assert _crc_offset(control) == offset


def test_a_control_file_without_checksum_is_refused() -> None:
    with pytest.raises(HeadwaterError, match="no checksum"):
        _crc_offset(b"x" * 8192)
