"""What `bloomery prepare` reads: files, folders, globs, URLs, every format; and every complaint about them."""

import errno
import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard

from bloomery.base.errors import DataError
from bloomery.prepare.extract import extract, plan_chunks
from bloomery.prepare.read import UnitReader, plan_units
from bloomery.prepare.sources import find_files, find_local
from prepare_samples import jsonl, make_texts, make_tokenizer, small_units, write_jsonl


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*sources, skip_bad=False, text_key="text"):
    """(texts, records left out)."""
    texts, bad = [], 0
    for unit in plan_units(find_files(sources)):
        reader = UnitReader(unit, text_key=text_key, skip_bad=skip_bad)
        for block in reader.blocks():
            texts += block.texts
            assert sum(map(len, block.places)) == len(block.texts)
        bad += reader.bad
    return texts, bad


def test_files_folders_and_globs_come_in_a_fixed_order(folder):
    for name in ("b.txt", "a.md", "deep/z.txt", "deep/.git/config", ".hidden"):
        (folder / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "corpus" / name).write_text(name)
    for source, names in [
        ("corpus", ["a.md", "b.txt", "deep/z.txt"]),
        ("corpus/**/*.txt", ["b.txt", "deep/z.txt"]),
        ("corpus/*", ["a.md", "b.txt", "deep/z.txt"]),
        ("corpus/**", ["a.md", "b.txt", "deep/z.txt"]),
        ("corpus/*/", ["deep/z.txt"]),
        ("corpus/[ab].*", ["a.md", "b.txt"]),
        ("corpus/.h*", [".hidden"]),
        ("corpus/b.txt", ["b.txt"]),
        (f"{folder}/cor*/d??p/z.txt", ["deep/z.txt"]),
        ("corpus/b.txt/**", []),
        ("corpus/b.txt/*", []),
    ]:
        assert [file.path.rpartition("corpus/")[2] for file in find_local(source)] == names, source
    assert [file.name for file in find_files(["**/b.*", "./corpus/d*"])] == ["corpus/b.txt", "./corpus/deep/z.txt"]
    assert read("corpus")[0] == read("**")[0] == ["a.md", "b.txt", "deep/z.txt"]


@pytest.mark.parametrize("source", ["tree", "tree/**/*.jsonl", "tree/*/b.jsonl", "tree/c*/*", "tree/**"])
def test_a_folder_that_may_not_be_read_is_an_error_that_names_it(folder, monkeypatch, source):
    write_jsonl(folder / "tree" / "a.jsonl", ["x"])
    write_jsonl(folder / "tree" / "closed" / "b.jsonl", ["y"])

    def refusing(call):
        def checked(path=".", *args, **kwargs):
            if "closed" in str(path).split("/")[: None if call in (os.scandir, os.listdir) else -1]:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return call(path, *args, **kwargs)

        return checked

    for name in ("scandir", "listdir", "stat", "lstat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    url = [f"file://{folder}/{source}"]
    for find in (find_files, lambda _: find_files(url), lambda sources: plan_chunks(sources, folder / "out", chunks=1)):
        with pytest.raises(DataError, match=r"tree/closed(/b.jsonl|/.)?: cannot be read: Permission denied"):
            find([source])


def test_links_are_followed_and_nothing_is_reached_twice(folder):
    write_jsonl(folder / "tree" / "real" / "a.jsonl", ["a"])
    write_jsonl(folder / "elsewhere" / "b.jsonl", ["b"])
    (folder / "tree" / "also").symlink_to("real")
    (folder / "tree" / "far").symlink_to(folder / "elsewhere")
    (folder / "tree" / "real" / "up").symlink_to("..")
    (folder / "tree" / "same.jsonl").symlink_to("real/a.jsonl")
    assert read("tree")[0] == ["b", "a"]
    assert [file.name for file in find_files(["tree"])] == ["tree/far/b.jsonl", "tree/real/a.jsonl"]
    assert [file.name for file in find_files(["tree/**/a.*"])] == ["tree/real/a.jsonl"]
    (chunk,) = plan_chunks(["tree"], folder / "out", chunks=1)
    assert tuple(file.path for file in chunk.inputs) == ("tree/far/b.jsonl", "tree/real/a.jsonl")
    (folder / "tree" / "broken.jsonl").symlink_to("nowhere")
    for find in (find_files, lambda sources: plan_chunks(sources, folder / "out", chunks=1)):
        with pytest.raises(DataError, match=r"tree/broken.jsonl: cannot be read: No such file"):
            find(["tree"])


@pytest.mark.parametrize("other", ["in/a.jsonl", "./in/a.jsonl", "in/a.*", "in", "link.jsonl", "in/../in", "file"])
def test_a_file_of_two_sources_is_an_error_that_names_both(folder, other):
    write_jsonl(folder / "in" / "a.jsonl", ["x"])
    (folder / "link.jsonl").symlink_to("in/a.jsonl")
    other = f"file://{folder}/in" if other == "file" else other
    with pytest.raises(DataError, match=r"jsonl: is in the source .* and in 'in/a.jsonl'. Each file counts once"):
        find_files(["in/a.jsonl", other])
    write_jsonl(folder / "in" / "b.jsonl", ["y"])
    with pytest.raises(DataError, match=r"in/a.jsonl: is in the source 'in' and in 'in/\*'"):
        find_files(["in/*", "in"])


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("c", "c/s"),
        ("./c", "c/deep/s"),
        ("c", "c/new/folder/s"),
        ("c/**/*.json*", "c/new/folder/s"),
        ("real", "c/s"),
        ("real/*/*.json*", "c/s"),
        ("c", "real/link/s"),
        ("file://{folder}/c", "c/s"),
        ("file://{folder}/c/*", "real/link/s"),
    ],
)
def test_outputs_of_the_recipe_are_never_sources(folder, source, output):
    """Through no link, glob or URL: else the next run would train on its manifest."""
    write_jsonl(folder / "c" / "a.jsonl", ["x"])
    write_jsonl(folder / "c" / "s.jsonl", ["y"])
    (folder / "c" / "deep").mkdir()
    (folder / "real").mkdir()
    (folder / "real" / "link").symlink_to("../c")
    source = source.format(folder=folder)
    before = find_files([source], outputs=["elsewhere/t", output])
    assert len(before) == 2
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    made = ".bin .idx .manifest.json .origins .parts/0.jsonl .partial-ab.bin .partial-ab.jsonl .verify-a/again.json"
    for ending in made.split():
        path = Path(output + ending)
        path.parent.mkdir(exist_ok=True)
        path.write_text("made")
    assert find_files([source], outputs=["elsewhere/t", output]) == before
    with pytest.raises(DataError, match=r"matches no file.*outputs of the recipe are no sources"):
        find_files([f"{output}.manifest.json"], outputs=[output])


def test_a_pipe_is_an_error_and_no_hang(folder):
    (folder / "tree").mkdir()
    (folder / "tree" / "a.py").write_text("x")
    os.mkfifo(folder / "tree" / "pipe.jsonl")
    for source in ("tree", "tree/pipe.jsonl", "tree/*"):
        for reads in (lambda source: read(source, skip_bad=True), lambda it: extract([it], folder / "out", chunks=1)):
            with pytest.raises(DataError, match=r"tree/pipe.jsonl: cannot be read: it is no regular file"):
                reads(source)
    assert read("tree/**/*.py")[0] == ["x"]


def test_the_standard_library_is_a_source_on_every_machine():
    names = [file.name for file in find_files(["python-stdlib"])]
    assert "python-stdlib/json/decoder.py" in names
    assert names == sorted(names)
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    texts, bad = read("python-stdlib")
    assert (len(texts), bad) == (len(names), 0)
    assert sum(map(len, texts)) > 3_000_000


@pytest.mark.parametrize("ending", ["", ".zst", ".gz"])
def test_every_way_to_store_lines_gives_the_same_texts(folder, ending, monkeypatch):
    texts = make_texts(500)
    write_jsonl(folder / f"a.jsonl{ending}", texts)
    assert read(f"a.jsonl{ending}") == (texts, 0)
    small_units(monkeypatch)
    assert read(f"a.jsonl{ending}") == (texts, 0)
    assert len(plan_units(find_files([f"a.jsonl{ending}"]))) > 5 or ending
    assert len({piece.file.kind for unit in plan_units(find_files(["a.*"])) for piece in unit.spans}) == 1


@pytest.mark.parametrize("ending", ["ndjson", "jsonlines", "NDJSON.zst", "JsonLines.gz"])
def test_lines_of_json_under_other_names(folder, ending):
    write_jsonl(folder / "in" / f"a.{ending.lower()}", ["one", "two"])
    (folder / "in" / f"a.{ending.lower()}").rename(folder / "in" / f"a.{ending}")
    assert read("in") == (["one", "two"], 0)
    assert extract(["in"], folder / "out", chunks=1).documents == 2


@pytest.mark.parametrize(
    "name",
    ["a.jsonl.bz2", "A.NDJSON.XZ", "a.jsonl.bz2.gz", "a.jsonl.gz.zst", "a.parquet.gz", "books.TAR.zst", "notes.zip"],
)
def test_files_packed_in_other_ways_are_an_error_even_when_skipping(folder, name):
    write_jsonl(folder / "in" / "b.jsonl", ["x"])
    (folder / "in" / name).write_bytes(b"plain enough to be one text")
    for find in (lambda sources: read(*sources, skip_bad=True), lambda s: plan_chunks(s, folder / "out", chunks=1)):
        with pytest.raises(DataError, match=rf"in/{name}: is packed in another way.*one .zst or .gz.*Unpack it"):
            find(["in"])


@pytest.mark.parametrize("name", ["a.tar.md", "tar", "gz", "a.jsonl.zip.txt", "altar"])
def test_names_that_only_look_packed_are_texts(folder, name):
    (folder / name).write_bytes(b"plain enough to be one text")
    assert read(name) == (["plain enough to be one text"], 0)


def test_rows_of_a_parquet_file(folder):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = make_texts(3000)
    parquet.write_table(arrow.table({"id": range(3000), "text": texts}), "a.parquet", row_group_size=700)
    assert read("a.parquet") == (texts, 0)
    with pytest.raises(DataError, match=r"a.parquet: has 0 columns 'content': its columns are id, text"):
        read("a.parquet", text_key="content")
    twice = arrow.Table.from_arrays([arrow.array(["x"]), arrow.array(["y"])], ["text", "text"])
    parquet.write_table(twice, "twice.parquet")
    with pytest.raises(DataError, match=r"twice.parquet: has 2 columns 'text': its columns are text, text"):
        read("twice.parquet")
    parquet.write_table(arrow.table({"text.en": ["no"], "text": ["yes"]}), "dots.parquet")
    assert read("dots.parquet") == (["yes"], 0)
    parquet.write_table(arrow.table({"text": ["x", None, "y"]}), "null.parquet")
    with pytest.raises(DataError, match=r"null.parquet:row 2: is no text in column 'text': None"):
        read("null.parquet")
    assert read("null.parquet", skip_bad=True) == (["x", "y"], 1)
    data = (folder / "a.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"cut.parquet: is truncated or damaged"):
        read("cut.parquet")


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_row_of_a_parquet_file_that_is_not_utf_8_is_named_or_counted(folder, kind):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = arrow.array([b"one", b"tw\xffo", None, b"three"], getattr(arrow, kind.replace("string", "binary"))())
    column = arrow.Array.from_buffers(getattr(arrow, kind)(), len(raw), raw.buffers())
    parquet.write_table(arrow.table({"text": column}), "a.parquet")
    with pytest.raises(
        DataError, match=r"a.parquet:row 2: is no text in column 'text'.* 0xff in position 2.*bad_records: skip"
    ):
        read("a.parquet")
    assert read("a.parquet", skip_bad=True) == (["one", "three"], 2)


def test_urls_are_read_through_fsspec(folder, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    small_units(monkeypatch)
    store = fsspec.filesystem("memory")
    texts = make_texts(300)
    store.pipe("/bucket/deep/a.jsonl", jsonl(texts))
    store.pipe("/bucket/b.jsonl.zst", zstandard.compress(jsonl(["last"])))
    store.pipe("/bucket/.hidden/c.jsonl", jsonl(["no"]))
    assert read("memory://bucket") == (["last", *texts], 0)
    assert len(plan_units(find_files(["memory://bucket/deep/a.jsonl"]))) > 3
    assert read("memory://bucket/*/a.jsonl") == (texts, 0)
    write_jsonl(folder / "local.jsonl", ["here"])
    assert read(f"file://{folder}/local.jsonl") == (["here"], 0)
    with pytest.raises(DataError, match="matches no file"):
        read("memory://nowhere/*.jsonl")
    with pytest.raises(DataError, match="cannot be read: Protocol not known: nonsense"):
        read("nonsense://x")


def test_a_server_that_does_not_report_the_length_is_an_error_not_an_empty_file(monkeypatch):
    store = pytest.importorskip("fsspec").filesystem("memory")
    store.pipe("/bucket/long.jsonl", jsonl(["x"]))
    info = store.info("/bucket/long.jsonl")
    monkeypatch.setattr(type(store), "info", lambda self, path, **_: {**info, "size": None})
    with pytest.raises(DataError, match=r"memory://.*/long.jsonl: its server does not report its length"):
        read("memory://bucket/long.jsonl")


def test_odd_but_valid_lines(folder):
    lines = [
        '{"text": "windows"}\r',
        "",
        "  ",
        '{"text": "score", "loss": NaN}',
        '{"text": "big", "n": ' + "9" * 40 + "}",
    ]
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join([*lines, '{"text": "no newline"}']).encode())
    assert read("a.jsonl") == (["windows", "score", "big", "no newline"], 0)


BROKEN = {
    b'{"text": "cut off': r"a\.jsonl:3: is not JSON in UTF-8: Unterminated string",
    b'{"content": "x", "id": 1}': r"a\.jsonl:3: has no string under 'text': its keys are content, id",
    b'{"text": 5}': r"a\.jsonl:3: has no string under 'text': it is 5",
    b'["text"]': r"a\.jsonl:3: has no string under 'text': it is no object",
    b'{"text": "\xff\xfe"}': r"a\.jsonl:3: is not JSON in UTF-8: .*can't decode byte 0xff in position 10",
    b'{"text": "\\ud800 half"}': r"a\.jsonl:3: is not JSON in UTF-8: .*surrogates not allowed",
    b"[" * 100_000: r"a\.jsonl:3: is not JSON",
}


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: line[:12].decode(errors="replace"))
def test_a_broken_line_is_named_or_counted(folder, line):
    (folder / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "also"}\n')
    with pytest.raises(DataError, match=BROKEN[line]) as caught:
        read("a.jsonl")
    assert "bad_records: skip" in str(caught.value)
    assert read("a.jsonl", skip_bad=True) == (["good", "also"], 1)


@pytest.mark.parametrize("digits", [20, 4300, 4301, 100_000])
def test_numbers_beside_the_text_may_have_any_size(folder, digits):
    (folder / "a.jsonl").write_text(f'{{"id": {"7" * digits}, "text": "x"}}\n{{"id": -{"7" * digits}, "text": "y"}}')
    assert read("a.jsonl") == (["x", "y"], 0)
    assert extract(["a.jsonl"], folder / "out", chunks=1).documents == 2


def test_the_line_number_is_that_of_the_file_even_in_a_later_unit(folder, monkeypatch):
    small_units(monkeypatch)
    lines = jsonl(make_texts(400)).splitlines()
    lines[321] = b"{"
    for name, content in (("a.jsonl", b"\n".join(lines)), ("a.jsonl.zst", zstandard.compress(b"\n".join(lines)))):
        (folder / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}:322: is not JSON"):
            read(name)


def test_endings_in_capitals_and_a_byte_order_mark_in_a_text(folder):
    write_jsonl(folder / "A.JSONL", ["one", "two"])
    (folder / "B.JSONL.GZ").write_bytes(gzip.compress(jsonl(["three"])))
    (folder / "c.txt").write_bytes(b"\xef\xbb\xbffour")
    assert read("A.JSONL", "B.JSONL.GZ", "c.txt") == (["one", "two", "three", "four"], 0)


def test_what_is_not_text_is_named_or_counted(folder):
    (folder / "c").mkdir()
    (folder / "c" / "a.png").write_bytes(b"\x89PNG\n\xff")
    (folder / "c" / "b.py").write_text("x = 1\n")
    with pytest.raises(DataError, match=r"c/a.png: is not UTF-8 at byte 0.*bad_records: skip"):
        read("c")
    assert read("c", skip_bad=True) == (["x = 1\n"], 1)


@pytest.mark.parametrize("pack", [zstandard.compress, gzip.compress])
def test_a_truncated_or_damaged_archive_is_an_error_even_when_skipping(folder, pack):
    ending = "zst" if pack is zstandard.compress else "gz"
    good = pack(jsonl(make_texts(2000)))
    for content, message in [
        (good[:-10], "is truncated or damaged"),
        (good[: len(good) // 2], "is truncated or damaged"),
        (good + good[:-5], "is truncated or damaged"),
        (b"plain text, not an archive", "is truncated or damaged"),
    ]:
        (folder / f"a.jsonl.{ending}").write_bytes(content)
        with pytest.raises(DataError, match=rf"a.jsonl.{ending}: {message}"):
            read(f"a.jsonl.{ending}", skip_bad=True)


def test_a_plain_file_without_bytes_holds_no_document(folder):
    (folder / "a.jsonl").touch()
    assert read("a.jsonl") == ([], 0)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "b.JSONL.GZ", "c.txt.gz", "d.parquet"])
def test_packed_files_without_bytes_were_cut_off(folder, name):
    write_jsonl(folder / "c" / "good.jsonl", ["x"])
    (folder / "c" / name).touch()
    with pytest.raises(DataError, match=rf"{name}: is truncated or damaged.*Copy or download"):
        read("c", skip_bad=True)


def test_sources_that_match_nothing_are_all_named():
    with pytest.raises(DataError, match=r"matches no file.*python-stdlib") as caught:
        read("nowhere", "also/*.rst")
    assert [problem.place for problem in caught.value.problems] == ["nowhere", "also/*.rst"]


def test_a_file_that_cannot_be_opened_is_named(folder, monkeypatch):
    write_jsonl(folder / "a.jsonl", ["x"])
    files = plan_units(find_files(["a.jsonl"]))
    (folder / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a.jsonl: cannot be read: No such file"):
        list(UnitReader(files[0], text_key="text", skip_bad=True).blocks())
    (folder / "a.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"is truncated or damaged: it ends 22 bytes before the end it had"):
        list(UnitReader(files[0], text_key="text", skip_bad=True).blocks())


def test_units_follow_from_the_files_alone(folder):
    for number in range(20):
        (folder / "c" / str(number)).parent.mkdir(exist_ok=True)
        (folder / "c" / str(number)).write_text("x" * 1000)
    write_jsonl(folder / "c" / "big.jsonl", ["y" * 100] * 100_000)
    (folder / "d").write_text("of another source")
    units = plan_units(find_files(["c", "d"]))
    assert [unit.number for unit in units] == list(range(len(units)))
    assert [piece.file.number for unit in units for piece in unit.spans] == [*range(20), 20, 20, 20, 20, 21]
    ranges = [(piece.start, piece.end) for unit in units for piece in unit.spans if piece.file.number == 20]
    content = (folder / "c" / "big.jsonl").read_bytes()
    assert b"".join(content[start:end] for start, end in ranges) == content
    assert all(content[end - 1 : end] == b"\n" for _, end in ranges)
    assert json.loads(content[ranges[1][0] :].split(b"\n")[0])["text"] == "y" * 100


RECIPE = """
base: quickstart
name: two
tokenizer: {path: tokenizer}
prepare:
  - {output: shards/a, sources: [a]}
  - {output: b/b, sources: [c]}
"""


def test_the_command_knows_the_outputs_of_all_sections(folder, command):
    make_tokenizer(folder / "tokenizer")
    for name in "abc":
        write_jsonl(folder / name / "a.jsonl", ["some text"])
    (folder / "two.yaml").write_text(RECIPE)
    (folder / "a" / "link").symlink_to("../b")
    assert command("prepare", "two.yaml")[0] == 0
    (folder / "shards" / "a.manifest.json").unlink()
    for rest in ((), ("--unit", "0/1"), ("--verify",)):
        code, _, err = command("prepare", "two.yaml", "--json", *rest)
        assert code == 0, err
    names = [file["name"] for file in json.loads(Path("shards/a.manifest.json").read_text())["source_files"]]
    assert names == ["a/a.jsonl", "a/link/a.jsonl"], "not a/link/b.bin"


def test_a_name_with_a_newline_stays_on_one_line(folder, command, tmp_path):
    (folder / "a\nb.jsonl").write_text("{")
    (folder / "a\nb.zip.jsonl.bz2").write_text("")
    for sources in (["a*"], ["a\nb.jsonl"], ["no\nwhere"], ["a*l", "a\nb.jsonl"]):
        for words in (["tokenizer", "train", *sources, "--vocab-size", "300"], ["extract", *sources, "--chunks", "1"]):
            code, _, err = command(*words, "--output", "o\nut")
            assert code == 3
            assert all(line.startswith("bloomery: ") for line in err.splitlines()), err
    with pytest.raises(DataError, match=r"a\\nb.jsonl:1: ") as caught:
        read("a\nb.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("url", "kind"), [("dir://x", "AttributeError"), ("reference://x", "TypeError")])
def test_a_url_on_which_its_library_fails_is_named(url, kind):
    with pytest.raises(DataError, match=rf"{url}: cannot be read: {kind}: .*Check the address"):
        find_files([url])
