"""Files that are written whole: what lies at their place and is no file stays what it is."""

import os
import stat
import threading

import pytest

from curve.files import write_whole
from machinery.files import last_line, whole_folder


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "π")
    reader.join(timeout=20)
    assert got == ["π"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_device_is_not_replaced(tmp_path):
    """As root a rename over /dev/null is possible: then programs that write there fail."""
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_text("")  # a mount may forbid devices
    except OSError:
        pytest.skip("even in CI: this user may make no device")
    write_whole(device, "text")
    assert stat.S_ISCHR(device.stat().st_mode) and device.read_text() == ""


def test_a_link_is_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("first", "second"):
        write_whole(link, text)
        assert link.is_symlink() and target.read_text() == text


def test_a_folder_is_refused_and_an_error_leaves_the_file_as_it_was(tmp_path):
    with pytest.raises(OSError):
        write_whole(tmp_path, "text")
    file = tmp_path / "file"
    write_whole(file, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "half \ud800")
    assert file.read_text() == "whole" and [*tmp_path.iterdir()] == [file]


def test_a_link_to_a_folder_is_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    for text in ("first", "second"):
        with whole_folder(link) as partial:
            (partial / "file").write_text(text)
        assert link.is_symlink() and (target / "file").read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link"}


def test_a_broken_last_line_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind": "end"}\n{"kind": "va\n')
    with pytest.raises(ValueError, match="log.jsonl, line 2: this is no JSON"):
        last_line(tmp_path)
