"""What a stranger may put where a small file is expected."""

import json
import os

import pytest

from penstock._small_files import SMALL, parse_json, read_json, read_text


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes('{"a": "\u00e9"}\r\n'.encode())
    assert read_text(path) == '{"a": "\u00e9"}\n'
    assert read_json(path) == {"a": "\u00e9"}
    path.write_bytes(b"x" * 4096)
    assert len(read_text(path, 4096)) == 4096
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")


def test_special_files_and_long_ones_are_refused_without_being_read(tmp_path):
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_text(path)
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        read_text("/dev/zero")
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match=f"config.json is longer than the {SMALL} bytes"):
        read_text(path)


def test_nested_and_malformed_text_is_an_error_in_a_line(tmp_path):
    path = tmp_path / "config.json"
    for text, match in ((200_000 * "[" + 200_000 * "]", "nested too deep"), ("[", "is no JSON"), ('{"a": 1', "is no JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=match) as raised:
            read_json(path)
        assert "\n" not in str(raised.value)
    path.write_bytes(b'"\xff"')
    with pytest.raises(ValueError, match="no text in UTF-8"):
        read_json(path)
    assert parse_json(json.dumps([1, None]), "x") == [1, None]
