"""What a stranger may put where a small file is expected."""

import json
import os
import tracemalloc

import pytest

from penstock import llm
from penstock._small_files import SMALL, VALUES, exists, is_directory, is_link, is_regular_file, open_regular, parse_json, read_bytes, read_json, read_text


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


def test_no_file_is_opened_for_writing_that_is_none(tmp_path, never_waits):
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    reader = None
    for _ in range(2):
        for flags in (os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDONLY):
            with pytest.raises(OSError, match="not a regular file") as refused:
                open_regular(pipe, flags)
            assert refused.value.filename == str(pipe)
        reader = reader or os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # and one that somebody reads
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path, os.O_RDONLY)
    for text in (b"first", b"second"):
        descriptor = open_regular(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        assert os.get_blocking(descriptor)
        os.write(descriptor, text)
        os.close(descriptor)
    assert read_bytes(file) == b"firstsecond"


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


def test_a_file_of_a_model_that_is_no_object_is_no_absent_one(tmp_path):
    """Its chat template would be another one, or none, without a word."""
    (tmp_path / "chat_template.jinja").write_text("text")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(ValueError, match=f"{name} is no object of JSON"):
            llm._ChatTemplate(str(tmp_path))
        (tmp_path / name).unlink()


def test_what_cannot_be_looked_at_is_no_absence(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    assert exists(tmp_path) and is_directory(tmp_path) and not is_regular_file(tmp_path)
    assert exists(tmp_path / "file") and is_regular_file(tmp_path / "file") and not is_directory(tmp_path / "file")
    for absent in ("none", "none/below", "file/below", "gone"):
        assert not exists(tmp_path / absent) and not is_directory(tmp_path / absent) and not is_regular_file(tmp_path / absent)
    assert exists(tmp_path / "gone", follow=False)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert not os.path.exists(tmp_path / "loop")
    assert is_link(tmp_path / "loop") and is_link(tmp_path / "gone") and not is_link(tmp_path / "file") and not is_link(tmp_path / "none")
    for look in (exists, is_directory, is_regular_file):
        with pytest.raises(OSError, match="symbolic links"):
            look(tmp_path / "loop")


def test_text_of_many_small_values_is_refused_before_it_takes_memory(tmp_path):
    """Each takes up to 150 bytes, and two of the text: 16 MiB of them would be a gigabyte."""
    path = tmp_path / "config.json"
    for value in ("[]", "{}", '{"a":1}', '["a"]', "[[]]", '""', "300", '{"a":{}}'):
        path.write_text("[" + (value + ",") * (SMALL // (len(value) + 1) - 1) + "0]")
        refused, least = peak_of(path)
        assert "more than the 400000 values and names that one of its kind may have" in refused and "\n" not in refused
        assert least < 40 << 20, (value, least)  # the text, twice while it is read
        # And the most that is accepted.
        count = VALUES // sum(map((value + ",").count, "[{,:")) - 2
        path.write_text("[" + (value + ",") * count + "0]")
        refused, least = peak_of(path)
        assert refused == "" and least < 64 << 20, (value, least)


def test_what_stands_within_strings_is_no_value(tmp_path):
    """A chat template has thousands of commas, and is one value."""
    text = json.dumps({"chat_template": '{"[\\",:' * VALUES, "list": list(range(VALUES - 5))})
    assert len(parse_json(text, "x")["list"]) == VALUES - 5
    with pytest.raises(ValueError, match="^x: the JSON has more than the 400000 values"):
        parse_json(json.dumps({"chat_template": '{"[\\",:' * VALUES, "list": list(range(VALUES + 5))}), "x")
    assert parse_json("[1, 2, 3]", "x", 3) == [1, 2, 3]
    with pytest.raises(ValueError, match="more than the 2 values"):
        parse_json("[1, 2, 3]", "x", 2)
    for broken in ('"' * 100, '"a' * 100, '",' * 100, '["' + "," * 100, "\\" * 101 + '"' + "," * 100):
        with pytest.raises(ValueError, match="^x( is no JSON|: the JSON has more than)"):
            parse_json(broken, "x", 10)


def peak_of(path):
    """What read_json says of the file, and the most bytes that it took meanwhile."""
    tracemalloc.start()
    try:
        read_json(path)
        told = ""
    except ValueError as error:
        told = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return told, peak
