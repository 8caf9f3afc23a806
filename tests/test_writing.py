"""Files and folders are written whole or not at all."""

import pytest

from regard.core.files import write_folder, write_text


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_folder_takes_the_place_of_the_one_before_it(tmp_path):
    for text in ("first", "second"):
        assert (
            write_folder(tmp_path / "model", lambda beside, text=text: (beside / "a").write_text(text))
            == tmp_path / "model"
        )
        assert (tmp_path / "model/a").read_text() == text
    assert names(tmp_path) == ["model"]


def test_a_folder_that_fails_leaves_the_one_before_it(tmp_path):
    def fail(beside):
        (beside / "a").write_text("half")
        raise OSError("no space")

    for expected in ([], ["model"]):
        with pytest.raises(OSError, match="no space"):
            write_folder(tmp_path / "model", fail)
        assert names(tmp_path) == expected
        write_folder(tmp_path / "model", lambda beside: (beside / "a").write_text("whole"))
    assert (tmp_path / "model/a").read_text() == "whole"


def test_a_file_takes_the_place_of_the_one_before_it(tmp_path):
    for text in ("first", "second"):
        write_text(tmp_path / "a.txt", text)
    assert (tmp_path / "a.txt").read_text() == "second"
    assert names(tmp_path) == ["a.txt"]
