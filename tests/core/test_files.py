"""Files are written whole or not at all."""

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zeropipe.core.files import require_writable, write_whole, writing
from zeropipe.errors import ConfigError


def only(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("data", ["größer\n", b"\x00\xff"])
def test_text_is_utf8_and_bytes_are_bytes(tmp_path, data):
    write_whole(tmp_path / "a.txt", data)
    write_whole(str(tmp_path / "a.txt"), data)
    assert (tmp_path / "a.txt").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(1), OSError(errno.ENOSPC, "full")]
)
@pytest.mark.parametrize("before", [{}, {"a.json": "old"}])
def test_a_block_that_fails_leaves_everything_as_it_was(tmp_path, error, before):
    for name, text in before.items():
        (tmp_path / name).write_text(text)

    def fail():
        with writing(tmp_path / "a.json") as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(ConfigError if isinstance(error, OSError) else type(error)):
        fail()
    assert only(tmp_path) == before


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    (tmp_path / "a.json").write_text("old")
    with writing(tmp_path / "a.json") as temporary:
        temporary.write_text("new")
        assert temporary.suffix == ".json"
        assert temporary.parent == tmp_path
        assert (tmp_path / "a.json").read_text() == "old"
    assert only(tmp_path) == {"a.json": "new"}


def test_a_full_disk_is_one_line():
    with pytest.raises(ConfigError, match=r"cannot write /dev/full: No space left on device$"):
        write_whole("/dev/full", "x" * 100_000)


def test_what_is_no_ordinary_file_is_written_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_whole("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("to", ["file", "pipe"])
def test_standard_output_is_written_between_other_output(tmp_path, to):
    code = """if True:
        from zeropipe.core.files import write_whole
        print("before", flush=True)
        write_whole("/dev/stdout", "data\\n")
        print("after", flush=True)
    """
    if to == "pipe":
        text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    else:
        with (tmp_path / "out").open("a") as out:
            subprocess.run([sys.executable, "-c", code], check=True, stdout=out)
        text = (tmp_path / "out").read_text()
    assert "data\n" in text
    assert text.endswith("after\n")


def test_permissions_and_links_stay(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("a")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        write_whole(tmp_path / "b", "")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "name,says",
    [
        (".", "it is a folder; name a file in it"),
        ("no/a.json", "there is no folder .*; create it first"),
        ("a.json/b.json", "there is no folder"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_a_target_that_cannot_be_is_refused_before_and_while_writing(tmp_path, name, says):
    (tmp_path / "a.json").write_text("old")
    path = f"{tmp_path}/{name}"
    for act in (lambda: require_writable(path), lambda: write_whole(path, "new")):
        with pytest.raises(ConfigError, match=f"cannot write .*{says}") as caught:
            act()
        assert "\n" not in str(caught.value)
    assert only(tmp_path) == {"a.json": "old"}


def test_a_link_to_nowhere_is_told_with_the_folder_it_leads_to(tmp_path):
    (tmp_path / "link.json").symlink_to("gone/a.json")
    for act in (require_writable, lambda path: write_whole(path, "new")):
        with pytest.raises(
            ConfigError, match=f"there is no folder {tmp_path}/gone, the target of the link; create it first"
        ):
            act(tmp_path / "link.json")


def test_a_long_name_is_possible(tmp_path):
    write_whole(tmp_path / f"{'x' * 240}.json", "new")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("forbidden,says", [("a", "it is read-only"), ("", "no file can be created in its folder")])
def test_no_permission_is_one_line(tmp_path, monkeypatch, forbidden, says):
    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / forbidden)
    with pytest.raises(ConfigError, match=f"Permission denied; {says}$"):
        write_whole(tmp_path / "a", "new")
    assert only(tmp_path) == {"a": "old"}


def test_text_that_is_no_text_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="is not valid in UTF-8"):
        write_whole(tmp_path / "a", "\ud800")
    assert only(tmp_path) == {}


def test_an_error_about_another_file_is_not_ours(tmp_path):
    with pytest.raises(FileNotFoundError), writing(tmp_path / "a"):
        Path(tmp_path / "elsewhere").read_text()
    assert only(tmp_path) == {}


KILLED = """
import sys
from zeropipe.core.files import writing

with writing(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_writer_leaves_is_removed_by_the_next_one(tmp_path):
    path = tmp_path / "run.toml"
    others = [tmp_path / ".run.toml", tmp_path / ".other.0123456789ab.toml", tmp_path / ".run.0123.toml"]
    for other in others:
        other.write_text("mine")
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout.readline() == "writing\n"
        write_whole(path, "new")  # a writer that lives is left alone
        assert len(list(tmp_path.glob(".run.*"))) == 3
        killed.kill()
        killed.wait(timeout=30)
    assert len(list(tmp_path.glob(".run.*"))) == 3
    write_whole(path, "newer")
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])
    assert path.read_text() == "newer"


def test_writers_at_the_same_time_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "a.json"
    texts = [f"{number}" * 1000 for number in range(8)]

    def write(text):
        for _ in range(30):
            write_whole(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, texts))
    assert list(tmp_path.iterdir()) == [path]
