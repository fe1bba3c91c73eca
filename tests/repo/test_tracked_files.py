"""What may not be in any tracked file."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Spelled in pieces, so that this file does not hold what it looks for.
REGISTRY_HOSTS = [
    "pypi" + ".org",
    "files.python" + "hosted.org",
    "download.py" + "torch.org",
    "registry.npm" + "js.org",
    "deb.deb" + "ian.org",
    "conda.ana" + "conda.org",
]
MACHINE_PATH = re.compile(
    r"(?<![\w.~}$-])/(?:" + "|".join(["work/", "root/", r"home/\w", r"Users/\w", "tmp/"]) + ")"
)
STUB = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error"]) + r")\b")
UNRUN = re.compile(r"pytest\.(?:mark\.)?(?:" + "|".join(["skip", "xfail", "importor" + "skip"]) + ")")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def lines_with(pattern: re.Pattern[str], suffixes: tuple[str, ...] = ()) -> list[str]:
    """Return "file:line: text" of the tracked text files with such suffixes (all without) that match."""
    found = []
    for path in tracked():
        if suffixes and path.suffix not in suffixes:
            continue
        text = path.read_bytes().decode(errors="ignore")
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:160]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    return found


@pytest.mark.parametrize("host", REGISTRY_HOSTS)
def test_no_registry_host(host: str) -> None:
    assert lines_with(re.compile(re.escape(host), re.IGNORECASE)) == []


def test_no_path_of_some_machine() -> None:
    assert lines_with(MACHINE_PATH) == []


def test_no_stub() -> None:
    found = lines_with(STUB, (".py", ".proto", ".sh"))
    assert [line for line in found if "_pb2_grpc.py:" not in line] == []  # gRPC generates its servicers so


def test_every_test_runs() -> None:
    assert lines_with(UNRUN, (".py",)) == []


def test_nothing_big_is_tracked() -> None:
    assert [str(path) for path in tracked() if path.stat().st_size > 1_000_000] == []
