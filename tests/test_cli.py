"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import itertools
import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import spdl_torch
from spdl_torch._cli import main

from .images import picture, save

TIMEOUT_SECONDS = 100

exhaustive = pytest.mark.exhaustive


def photo(seed=0, **options):
    return save(picture(seed=seed), "JPEG", **options)


@pytest.fixture
def folder(tmp_path):
    """Twelve images of two classes."""
    root = tmp_path / "images"
    for number in range(12):
        path = root / ("cats" if number % 2 else "dogs") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(number))
    return root


def run(*arguments):
    return main([str(argument) for argument in arguments])


def document(capsys):
    """Return what was printed, which must be one JSON document and nothing else."""
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def command(*arguments, **options):
    """Run the command line in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "spdl_torch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        **options,
    )


# -- check -----------------------------------------------------------------------------------------


def scan_start(jpeg):
    """Where the image data begin."""
    position = jpeg.index(b"\xff\xda")
    return position + 2 + int.from_bytes(jpeg[position + 2 : position + 4], "big")


def with_middle(jpeg, middle):
    start = scan_start(jpeg)
    position = start + (len(jpeg) - start) // 3
    return jpeg[:position] + middle + jpeg[position + len(middle) :]


def without_segments(jpeg, marker):
    position, kept = 2, [jpeg[:2]]
    while position < scan_start(jpeg):
        end = position + 2 + int.from_bytes(jpeg[position + 2 : position + 4], "big")
        if jpeg[position + 1] != marker:
            kept.append(jpeg[position:end])
        position = end
    return b"".join([*kept, jpeg[position:]])


def with_height(jpeg, height):
    position = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:position] + height.to_bytes(2, "big") + jpeg[position + 2 :]


DAMAGE = {
    "cut in half": lambda jpeg, _: jpeg[: len(jpeg) // 2],
    "cut near its end": lambda jpeg, draw: jpeg[: -draw.randint(3, 40)],
    "half, and zeros": lambda jpeg, _: jpeg[: len(jpeg) // 2].ljust(len(jpeg), b"\0"),
    "zeros in the middle": lambda jpeg, _: with_middle(jpeg, bytes(len(jpeg) // 4)),
    "random bytes in the middle": lambda jpeg, draw: with_middle(jpeg, draw.randbytes(2000)),
    "wrong header": lambda jpeg, draw: draw.randbytes(16) + jpeg[16:],
    "empty": lambda *_: b"",
    "text": lambda *_: b"Remember to take a photograph of the cat.\n" * 100,
    "page of an error": lambda *_: b"<!DOCTYPE html><title>404 Not Found</title>",
    "without its tables": lambda jpeg, _: without_segments(jpeg, 0xDB),
    "two files in one": lambda jpeg, _: jpeg[: len(jpeg) // 2] + jpeg,
    # What FFmpeg alone decodes without a word:
    "without the last data": lambda jpeg, draw: jpeg[: -draw.randint(4, 6)] + jpeg[-2:],
    "more data than pixels": lambda jpeg, draw: (
        jpeg[:-2] + bytes(draw.randint(40, 900)) + jpeg[-2:]
    ),
    "half its height": lambda jpeg, _: with_height(jpeg, 120),
}


@pytest.mark.parametrize(
    ("num_good", "num_each"), [(30, 1), pytest.param(300, 5, marks=exhaustive)]
)
def test_check_finds_damaged_images(num_good, num_each, tmp_path, capsys):
    """`check` reports every damaged image and no good one."""
    draw = random.Random(0)
    good = [photo(number % 10, quality=66 + number // 10) for number in range(num_good)]
    for number, jpeg in enumerate(good):
        (tmp_path / str(number % 7)).mkdir(exist_ok=True)
        (tmp_path / str(number % 7) / f"good {number}.JPEG").write_bytes(jpeg)
    expected = set()
    for kind, damaged in DAMAGE.items():
        for number, jpeg in enumerate(draw.sample(good, num_each)):
            path = tmp_path / str(number) / f"{kind}.jpg"
            path.write_bytes(damaged(jpeg, draw))
            expected.add(str(path))
    assert run("check", tmp_path, "--json", "--workers", 3) == 1
    report = document(capsys)
    assert {damaged["path"] for damaged in report["damaged"]} == expected
    assert (report["num_images"], report["num_damaged"]) == (
        num_good + len(expected),
        len(expected),
    )


def test_check_of_good_images(folder, capsys):
    """`check` of good images prints only a summary, on stderr."""
    assert run("check", folder) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("12 checked, 0 damaged")
    assert printed.out == ""


def test_check_prints_path_and_reason(folder, capsys):
    """A damaged image is one line with its path and the reason."""
    path = folder / "[bold]a\nlong name" / ("x" * 200 + ".png")
    path.parent.mkdir()
    path.write_bytes(b"")
    assert run("check", folder) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{path}: it is empty".replace("\n", "\\n") + "\n"
    assert printed.err.startswith("13 checked, 1 damaged")


def test_check_of_one_file(tmp_path, capsys):
    """A single file is checked whatever its suffix."""
    good, bad = tmp_path / "good", tmp_path / "bad.txt"
    good.write_bytes(photo())
    bad.write_bytes(photo()[:5000])
    assert run("check", good, "--json") == 0
    assert document(capsys)["num_images"] == 1
    assert run("check", bad) == 1
    assert capsys.readouterr().out.startswith(f"{bad}: it is truncated")


def test_check_reports_unopenable_paths(folder, capsys):
    """Broken links and named pipes are findings; links that lead back are not followed."""
    (folder / "broken.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "back").symlink_to(folder)
    assert run("check", folder, "--json") == 1
    assert {Path(d["path"]).name: d["reason"] for d in document(capsys)["damaged"]} == {
        "broken.jpg": "it cannot be read: No such file or directory",
        "pipe.jpg": "it is no regular file",
    }


def test_check_accepts_all_jpeg_layouts(tmp_path, capsys):
    """Good JPEGs of all layouts pass, with anything behind their end."""
    layouts = [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}]
    layouts += [{"restart_marker_blocks": 1}, {"restart_marker_rows": 2}, {"optimize": True}]
    for number, layout in enumerate(layouts):
        for quality in (10, 75, 100):
            # With something behind the image, as cameras and phones have it.
            jpeg = photo(quality=quality, **layout) + photo()
            (tmp_path / f"{number} {quality}.jpg").write_bytes(jpeg)
    for side in (1, 8, 17):
        (tmp_path / f"{side} pixels.jpg").write_bytes(save(picture(side, side), "JPEG"))
    assert run("check", tmp_path, "--json") == 0
    assert document(capsys)["num_images"] == 24


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_check_reports_missing_permissions(folder, capsys):
    """Files and folders without read permission are findings."""
    (folder / "cats/1.jpg").chmod(0)
    (folder / "dogs").chmod(0)
    try:
        assert run("check", folder, "--json") == 1
    finally:
        (folder / "dogs").chmod(0o700)
    assert {Path(d["path"]).name: d["reason"] for d in document(capsys)["damaged"]} == {
        "1.jpg": "it cannot be read: Permission denied",
        "dogs": "the folder cannot be read: Permission denied",
    }


def test_check_decodes_all_formats(tmp_path, capsys):
    """All image formats are decoded, and other files are ignored."""
    for suffix in ("jpg", "png", "webp", "gif", "bmp", "tiff"):
        pixels = picture(40, 56)
        (tmp_path / f"a.{suffix}").write_bytes(
            save(pixels, {"jpg": "JPEG"}.get(suffix, suffix.upper()))
        )
    (tmp_path / "notes.txt").write_text("not an image")
    assert run("check", tmp_path, "--json") == 0
    assert document(capsys)["num_images"] == 6


# -- bench -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [[], ["--recipe"]])
@pytest.mark.parametrize("augment", [["--augment"], pytest.param([], marks=exhaustive)])
def test_bench_compares_same_work(folder, capsys, augment, recipe):
    """The loaders deliver the same crops, and their ratios fit together."""
    options = ["--batch-size", 4, "--workers", 2, "--size", 48, "--rounds", 2, *augment, *recipe]
    assert run("bench", folder, "--json", *options) == 0
    report = document(capsys)
    names = [loader["name"] for loader in report["loaders"]]
    last = ["spdl_torch, fuse=True"] if recipe else []
    assert names == ["torch + PIL", "torch + torchvision.io", "spdl_torch", *last]
    for loader in report["loaders"]:
        assert len(loader["rounds"]) == 2
        assert loader["images_per_second"] > 0
        # They take the same parts of the images: others would be off by dozens of levels.
        assert loader["difference_from_pil"] < 2
        assert min(loader["ratios"]) <= loader["ours_divided_by_it"] <= max(loader["ratios"])
    for loader in report["loaders"][:-1]:
        assert loader["is_clear"] == (min(loader["ratios"]) > 1 or max(loader["ratios"]) < 1)
    assert report["loaders"][-1]["is_clear"] is None
    if recipe:  # Unmodified, PIL decodes; fused, FFmpeg does.
        assert report["loaders"][2]["difference_from_pil"] == 0
        assert report["loaders"][3]["difference_from_pil"] > 0.01
    assert (report["num_images"], report["num_used"], report["num_left_out"]) == (12, 12, 0)


@pytest.mark.parametrize("is_flat", [True, False])
def test_bench_code_runs(folder, capsys, is_flat):
    """The printed code makes a loader of the same images."""
    if is_flat:
        folder /= "cats"
    options = ["--batch-size", 3, "--workers", 1, "--size", 32, "--rounds", 1]
    assert run("bench", folder, "--json", *options) == 0
    names = {}
    exec(document(capsys)["code"], names)
    with names["loader"] as loader:
        batches = list(loader)
    images = batches[0] if is_flat else batches[0][0]
    assert (images.shape, images.dtype) == ((3, 3, 32, 32), torch.uint8)
    assert len(batches) == (2 if is_flat else 4)


@pytest.mark.parametrize("augment", [["--augment"], pytest.param([], marks=exhaustive)])
def test_bench_code_fuses_recipe(folder, capsys, augment):
    """The printed code makes a loader of normalised images that fuses the whole chain."""
    (folder / "none of these").mkdir()
    options = ["--batch-size", 3, "--workers", 1, "--size", 32, "--rounds", 1, *augment]
    assert run("bench", folder, "--json", "--recipe", *options) == 0
    names = {}
    exec(document(capsys)["code"], names)
    with names["loader"] as loader:
        [fusion] = loader.plan.fusions
        images, _ = next(iter(loader))
    assert len(fusion.while_decoding) == len(fusion.per_batch) == 2
    assert (images.shape, images.dtype) == ((3, 3, 32, 32), torch.float32)
    assert images.min() < 0


def test_bench_refuses_recipe_without_classes(folder, capsys):
    """A recipe for a folder without classes is an error of one line."""
    assert run("bench", folder / "cats", "--recipe") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "Give a folder that has one subfolder for each class" in printed.err


def test_bench_leaves_out_undecodable_images(folder, capsys):
    """Images that one of the decoders cannot read are left out, and counted."""
    (folder / "cats/damaged.jpg").write_bytes(photo()[:5000])
    (folder / "cats/windows.bmp").write_bytes(save(picture(), "BMP"))
    (folder / "none of these").mkdir()
    options = ["--batch-size", 4, "--workers", 1, "--size", 32, "--rounds", 1]
    assert run("bench", folder, *options) == 0
    printed = capsys.readouterr().out
    assert "12 of 14 images" in printed
    assert "1 worker each" in printed
    assert "One round may be chance" in printed
    assert "not every loader can decode them: 2." in printed
    assert f'ImageFolder("{folder}", loader=images, allow_empty=True)' in printed


def test_bench_refuses_large_batch_size(folder, capsys):
    """A batch size above the number of images is an error of one line."""
    assert run("bench", folder, "--batch-size", 13) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "Give --batch-size 12 or less." in printed.err


@exhaustive
def test_bench_reduces_default_batch_size(folder, capsys):
    """The default batch size is reduced to the number of images."""
    assert run("bench", folder, "--json", "--workers", 1, "--size", 32, "--rounds", 1) == 0
    assert document(capsys)["batch_size"] == 12


@exhaustive
@pytest.mark.parametrize("recipe", [[], ["--recipe"]])
def test_bench_explains_ratios(folder, capsys, monkeypatch, recipe):
    """The output says how ratios are taken and where the rounds disagree."""
    monkeypatch.setenv("COLUMNS", "80")
    ticks = itertools.count()
    # Every delivery is as long after the one before.
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 100)
    options = ["--batch-size", 2, "--workers", 1, "--size", 32, "--rounds", 3, *recipe]
    assert run("bench", folder, *options) == 0
    printed = capsys.readouterr().out
    assert "Medians of 3 interleaved rounds (lowest–highest)" in printed
    assert "need not be the ratio of the medians" in printed
    assert "…" not in printed  # The table fits.
    assert printed.count("1.00 (1.00–1.00)") == printed.count("no clear difference")
    assert printed.count("no clear difference") == (3 if recipe else 2)


def test_bench_without_good_images_fails(tmp_path, capsys):
    """A folder without a good image is an error that names `check`."""
    (tmp_path / "a.jpg").write_bytes(b"text")
    assert run("bench", tmp_path, "--workers", 1) == 1
    assert "spdl-torch check" in capsys.readouterr().err


# -- profile ---------------------------------------------------------------------------------------

MODULE = """
import torch.utils.data
import spdl_torch

def make_loader():
    return spdl_torch.DataLoader(range(64), batch_size=4)

def make_torch_loader():
    return torch.utils.data.DataLoader(range(64))

def make_list():
    return []

def make_empty():
    return spdl_torch.DataLoader([], batch_size=4)

def make_with(size):
    return None

class Broken:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.fail()

    def fail(self):
        raise KeyError("of the user")

def make_broken():
    return spdl_torch.DataLoader(Broken(), batch_size=4, num_workers=2)

def make_broken_in_caller():
    return spdl_torch.DataLoader(Broken(), batch_size=4)

def make_nothing():
    raise KeyError("of the user")

number = 1
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the current directory."""
    monkeypatch.chdir(tmp_path)
    name = f"cli_module_{len(sys.modules)}"
    Path(f"{name}.py").write_text(MODULE)
    yield name
    sys.modules.pop(name, None)


def test_profile_is_saved(module, tmp_path, capsys):
    """The profile is printed, and saved as a page and as a trace."""
    html, trace = tmp_path / "report.html", tmp_path / "trace.json"
    files = ["--html", html, "--trace", trace]
    assert run("profile", f"{module}:make_loader", "--batches", 4, *files) == 0
    printed = capsys.readouterr().out
    assert "loop: 4 batches" in printed
    assert printed.endswith(f"saved {html}\nsaved {trace}\n")
    assert "<html" in html.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@exhaustive
def test_profile_of_folder(folder, capsys):
    """The images of a folder are profiled with worker threads, stage by stage."""
    options = ["--batches", 4, "--batch-size", 2, "--workers", 2, "--size", 32, "--augment"]
    assert run("profile", folder, *options, "--json") == 0
    report = document(capsys)
    assert report["stats"]["loop"]["num_batches"] == 4
    assert [one["stage"] for one in report["scalings"]] == ["load", "preprocess", "collate"]


def test_profile_of_function(module, capsys):
    """The function is imported from the current directory."""
    assert run("profile", f"{module}:make_loader", "--batches", 4, "--json") == 0
    report = document(capsys)
    assert report["stats"]["loop"]["num_batches"] >= 1
    assert report["stats"]["verdict"]["sentence"]


def test_profile_of_torch_loader_fails(module, capsys):
    """A loader of torch's class is an error that says which import to change."""
    assert run("profile", f"{module}:make_torch_loader") == 2
    assert "from spdl_torch import DataLoader" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "first_function"),
    [
        ("make_broken", "__getitem__"),
        ("make_broken_in_caller", "__getitem__"),
        ("make_nothing", "make_nothing"),
    ],
)
def test_traceback_begins_in_user_code(factory, first_function, module, capsys):
    """The traceback of the user's exception begins at the first line of the user's code."""
    assert run("profile", f"{module}:{factory}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith(f"in {first_function}")
    assert f"{module}.py" in lines[1]
    assert any(line == "KeyError: 'of the user'" for line in lines)


@pytest.mark.children
def test_traceback_of_child_is_short(module, capsys):
    """An exception from a child process has its traceback there, and no other."""
    assert run("profile", f"{module}:make_broken") == 1
    printed = capsys.readouterr().err
    assert printed.splitlines()[1].endswith("in __getitem__")
    assert "KeyError: 'of the user'" in printed.splitlines()
    assert printed.count("Traceback") == 1


def test_syntax_error_has_no_frames(module, capsys):
    """A syntax error is printed without frames of this package."""
    Path(f"{module}.py").write_text("def make(:\n")
    assert run("profile", f"{module}:make") == 1
    printed = capsys.readouterr().err
    assert f'{module}.py", line 1' in printed
    assert "_profile.py" not in printed
    assert "SyntaxError" in printed


def test_profile_of_damaged_image_fails(folder, capsys):
    """A damaged image is an error of one line that names `check`."""
    for path in folder.glob("cats/*"):
        path.write_bytes(b"")
    assert run("profile", folder, "--batch-size", 2, "--workers", 1) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "it is empty" in printed.err
    assert f"spdl-torch check {folder}" in printed.err


# -- demo ------------------------------------------------------------------------------------------


@exhaustive
def test_demo_trains_with_both_loaders(capsys):
    """Both models learn, and the document has a verdict."""
    assert run("demo", "--images", 64, "--workers", 2, "--json") == 0
    report = document(capsys)
    torchs, ours = report["loaders"]
    assert (torchs["name"], ours["name"]) == ("torch + PIL", "spdl_torch")
    for first, second in [torchs["epochs"], ours["epochs"]]:
        assert second["loss"] < first["loss"]
    # As large as photographs are, for decoding is what it is about.
    assert 50_000 < report["num_bytes"] / 64 < 200_000
    assert report["stats"]["verdict"]["sentence"]


@exhaustive
def test_demo_prints_table(capsys):
    """The demo prints a table with both loaders and the verdict."""
    assert run("demo", "--images", 32, "--workers", 1) == 0
    printed = capsys.readouterr().out
    for word in ("images/s", "accuracy", "torch + PIL", "spdl_torch", "Verdict: ", "1 worker."):
        assert word in printed
    assert "Loss and accuracy differ slightly" in printed
    assert "first batch" not in printed


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["--workres"], "unknown option --workres"),
        (["--workers", "4", "bench", "empty"], "unknown option --workers; options of a command"),
        (["check", "empty", "--workres", "4"], "unrecognized arguments: --workres 4"),
        (["check"], "required: DIR|FILE"),
        (["check", "nowhere"], "nowhere: No such file or directory"),
        (["check", "empty"], "there are no images in empty"),
        (["bench", "nowhere"], "nowhere: No such file or directory"),
        (["bench", "empty"], "there are no images in empty"),
        (["bench", "empty", "--workers", "0"], "must be a whole number from 1 up, got '0'"),
        (["bench", "empty", "--size", "x"], "must be a whole number from 1 up, got 'x'"),
        (["profile", "empty"], "there are no images in empty"),
        (["profile", "nowhere"], "nowhere is neither a folder nor a function"),
        (["profile", "nowhere:make"], "cannot import nowhere: No module named 'nowhere'"),
        (["profile", "json:make"], "json has no make"),
        (["profile", "json:make", "--html", "a.txt"], "--html takes a file that ends in .html"),
        (["profile", "json:make", "--trace", "no/a.json"], "there is no directory no"),
        (["profile", "{module}:number"], "is of type int. Name a function"),
        (["profile", "{module}:make_list"], "returns an object of type list. It must return"),
        (["profile", "{module}:make_empty"], "make_empty has no batches"),
        (["profile", "{module}:make_with"], "missing a required argument: 'size'"),
        (["profile", "{module}.py:make_loader"], "Did you mean {module}:make_loader?"),
        (["profile", "a/{module}.py:make"], "Did you mean a.{module}:make?"),
        (
            ["profile", "{module}:make_loader", "--workers", "4", "--augment"],
            "--workers, --augment: for a folder of images only",
        ),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message, module, capsys):
    """Wrong usage is one line on stderr and exit code 2."""
    Path("empty").mkdir()
    Path("file.jpg").touch()
    assert run(*(argument.format(module=module) for argument in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("spdl-torch")
    assert printed.err.count("\n") == 1
    assert message.format(module=module) in printed.err


@pytest.mark.parametrize("name", [None, "demo", "bench", "profile", "check", "cache"])
def test_help_has_example(name, capsys):
    """The help of every command ends with an example."""
    with pytest.raises(SystemExit) as exit_info:
        run(*filter(None, [name]), "--help")
    assert exit_info.value.code == 0
    assert f"  spdl-torch {name or 'demo'}" in capsys.readouterr().out.split("example")[-1]


def test_version_is_printed(capsys):
    """`--version` prints the version of the package."""
    with pytest.raises(SystemExit) as exit_info:
        run("--version")
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"spdl-torch {spdl_torch.__version__}\n"


# -- in a process of its own -----------------------------------------------------------------------


@exhaustive
def test_pipe_gets_plain_text(folder):
    """Output to a pipe has neither colours nor progress bars."""
    (folder / "empty.jpg").touch()
    plain = {"NO_COLOR": "1", "FORCE_COLOR": "", "PYTHONIOENCODING": "ascii"}
    program = command("check", folder, env=os.environ | plain)
    assert program.returncode == 1
    assert program.stdout == f"{folder}/empty.jpg: it is empty\n"
    assert "\x1b" not in program.stderr
    assert program.stderr.startswith("13 checked, 1 damaged")
    assert program.stderr.count("\n") == 1


@exhaustive
def test_terminal_gets_progress_bar(folder):
    """A terminal shows progress bars and whole lines."""
    (folder / "empty.jpg").touch()
    leader, follower = pty.openpty()
    arguments = [sys.executable, "-m", "spdl_torch", "check", str(folder)]
    with subprocess.Popen(arguments, stdout=follower, stderr=follower) as process:
        os.close(follower)
        printed = b""
        while chunk := _read(leader):
            printed += chunk
        assert process.wait(TIMEOUT_SECONDS) == 1
    os.close(leader)
    assert b"checking" in printed
    assert f"{folder}/empty.jpg: it is empty\r\n".encode() in printed
    assert b"13 checked, 1 damaged" in printed


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux raises this when the other end is closed.
        return b""


@pytest.mark.parametrize("num_processes", [0, 1, 2])
def test_ctrl_c_exits_with_130(tmp_path, module, num_processes):
    """Ctrl-C while workers are busy ends the command with exit code 130."""
    Path(f"{module}.py").write_text(
        "import os, signal\n"
        "import spdl_torch\n"
        "class Images:\n"
        "    def __len__(self): return 1000\n"
        "    def __getitem__(self, index):\n"
        # As a terminal does: to the command and to its child processes.
        "        if index == 20: os.killpg(0, signal.SIGINT)\n"
        "        return index\n"
        "def make(): return spdl_torch.DataLoader(\n"
        f"    Images(), batch_size=2, num_workers=2, num_processes={num_processes})\n"
    )
    program = command("profile", f"{module}:make", "--batches", 500, start_new_session=True)
    assert (program.returncode, program.stdout) == (128 + signal.SIGINT, "")
    assert program.stderr == "spdl-torch profile: interrupted\n"
