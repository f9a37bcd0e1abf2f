"""Files that are written whole: what lies at their place and is no file stays what it is."""

import os

import pytest
from safetensors.torch import save_file

from curve.files import write_whole
from machinery.folder import whole_folder


def test_an_error_leaves_a_file_or_a_folder_as_it_was(tmp_path):
    """safetensors says by an error of its own that it cannot write."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    write_whole(file, "whole")
    with whole_folder(folder) as partial:
        write_whole(partial / "file", "whole")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "half \ud800")
    with pytest.raises(OSError, match="No such file"), whole_folder(folder) as partial:
        save_file({}, partial / "nowhere" / "file")
    assert file.read_text() == (folder / "file").read_text() == "whole"
    assert {*tmp_path.iterdir()} == {file, folder}


def test_a_pipe_stays_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    write_whole(pipe, "text")
    assert os.read(reader, 9) == b"text" and pipe.is_fifo()
    os.close(reader)


def test_links_are_followed(tmp_path):
    target, link, of_file = tmp_path / "target", tmp_path / "link", tmp_path / "of a file"
    target.mkdir()
    (target / "before").touch()
    link.symlink_to(target)
    of_file.symlink_to(target / "other")
    with whole_folder(link) as partial:
        (partial / "file").write_text("text")
    write_whole(of_file, "text")
    assert link.is_symlink() and of_file.is_symlink()
    assert {path.name for path in target.iterdir()} == {"file", "other"}
