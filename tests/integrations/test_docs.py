"""The code in docs/iterators.md runs, and the change that it asks of a script is as small as it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "iterators.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here (tests of the installed wheel)")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def before_and_after():
    [diff] = blocks("diff")
    lines = [line or " " for line in diff.splitlines()]
    assert {line[0] for line in lines} == set(" -+")
    return tuple("\n".join(line[1:] for line in lines if line[0] in " " + sign) for sign in "-+")


FILES = """
import datetime, sys
from pathlib import Path
import torch.distributed as dist
from dshuffle.integrations.sampler import ExchangeSampler

block, first_epoch, last_epoch, fails = Path("block.py").read_text(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rank = int(sys.argv[1])
names = {}
exec(block, names)
store, minutes = dist.FileStore(f"store-{first_epoch}-{fails}", 2), datetime.timedelta(minutes=3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=minutes)
folder = Path(str(rank))
sampler = ExchangeSampler(range(25), assignment="partial:0.5", mode="uneven")
write, written = names["write"], []

def write_or_fail(path, content):
    if sampler.epoch == last_epoch and len(written) == 2 and fails == "fails" and rank == 1:
        raise SystemExit("the disk of rank 1 is full")
    written.append(path)
    write(path, content)

names["write"] = write_or_fail
for epoch in range(first_epoch, last_epoch + 1):
    sampler.set_epoch(epoch)
    written.clear()
    names["exchange"](sampler, folder, Path("storage"))
    assert len(written) > 2 or first_epoch == epoch > 0
    assert sorted(int(path.name) for path in folder.iterdir()) == sorted(sampler)
    for path in folder.iterdir():
        assert path.read_bytes() == bytes([int(path.name)]) * 3 * int(path.name), path
dist.barrier()
dist.destroy_process_group()
"""
"""Two ranks exchange files. File k has 3 k bytes with the value k."""


def run(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_at_most_six_lines_change():
    before, after = (script.splitlines() for script in before_and_after())
    changed = [line for line in after if line not in before]
    assert 0 < len(changed) <= 6


@pytest.mark.parametrize("which", [0, 1])
def test_the_script_trains_on_every_sample_before_and_after(torch, which):
    names = {}
    exec(before_and_after()[which], names)
    ranks = [names["train"](rank, 4) for rank in range(4)]
    for epoch in range(3):
        assert sorted(sample for rank in ranks for sample in rank[epoch]) == list(range(100))
    stays = [len(set(rank[0]) & set(rank[1])) for rank in ranks]
    assert all(count < 20 for count in stays) if which == 0 else stays == [22] * 4


@pytest.mark.slow
def test_the_pytorch_example_runs(torch, tmp_path):
    assert run(blocks("python")[0], tmp_path) == ["0 [7, 7]", "1 [7, 7]"]


@pytest.mark.slow
def test_the_permutation_example_runs(tmp_path):
    assert run(blocks("python")[1], tmp_path) == ["True"]


def exchange_files(folder, *arguments):
    ranks = [
        subprocess.Popen([sys.executable, "-c", FILES, rank, *map(str, arguments)], cwd=folder, stderr=subprocess.PIPE)
        for rank in "01"
    ]
    errors = [process.communicate(timeout=200)[1].decode() for process in ranks]
    return [process.returncode for process in ranks], errors


@pytest.mark.slow
def test_files_move_between_the_folders_of_two_ranks(torch, tmp_path):
    shutil.copy(ROOT / "pipelines" / "files_on_disks.py", tmp_path / "block.py")
    for name in ("storage", "0", "1"):
        (tmp_path / name).mkdir()
    content = {str(sample): bytes([sample]) * 3 * sample for sample in range(25)}
    for name, text in content.items():
        (tmp_path / "storage" / name).write_bytes(text)
    codes, errors = exchange_files(tmp_path, 0, 2, "fails")
    assert codes[1] == 1, errors
    assert "the disk of rank 1 is full" in errors[1]
    copies = {path.name: path.read_bytes() for rank in "01" for path in (tmp_path / rank).iterdir()}
    assert copies == content, "there is a copy of each file, and no part of one"
    (tmp_path / "storage").rename(tmp_path / "unused")  # all comes from the other rank
    codes, errors = exchange_files(tmp_path, 2, 3, "goes on")
    assert codes == [0, 0], errors
    (tmp_path / "unused").rename(tmp_path / "storage")
    codes, errors = exchange_files(tmp_path, 1, 1, "goes back")
    assert codes == [0, 0], errors
